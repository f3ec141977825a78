"""Damaged copies of text files, for tests that fuzz their readers."""

import os


def replace_file(path, data):
  """Writes a file, after one that is there has been removed."""
  # Some file systems wait for the disk when a file is cut short and rewritten.
  if os.path.exists(path):
    os.remove(path)
  with open(path, 'xb') as f:
    f.write(data)


def mutated(data, draw, tokens):
  """A copy with one to three small damages."""
  for _ in range(draw.randint(1, 3)):
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 1, 1, 3, 8)))
    lines = data.split(b'\n')
    data = draw.choice(
      (
        data[:at] + bytes([draw.randrange(256)]) + data[end:],
        data[:at] + draw.choice(tokens) + data[at:],
        data[:at] + data[end:],
        data[:at],
        b'\n'.join(draw.sample(lines, len(lines))),
        b'\n'.join(lines + [draw.choice(lines)]),
      )
    )
  return data
