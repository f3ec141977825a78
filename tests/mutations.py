"""Damaged copies of text files, for tests that fuzz their readers."""

import os
import random

from anp_jax import config as config_lib


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


TOKENS = (
  *(b'\n', b'\r', b'\r\n', b' ', b'\t', b'\0', b'/', b'_', b',', b'-', b'.', b'9', b'e99'),
  *(b'nan', b'inf', b'\xef\xbb\xbf', b'\xff', b'\xc3', b'\xc2\x85', b'\xe2\x80\xa8'),
  *('\u00e9'.encode(), b'dog', b'red', b'[', b']', b'[sentiment:', b'2. sad'),
)


def check_reader(path, data, read, check):
  """Damaged copies of a text are refused in a line that names the file, or mean what they say.

  Args:
    path: file that each copy is written to.
    data: text, whole.
    read: function of the path.
    check: asserts what holds for whatever is read.
  """
  draw = random.Random(20)
  rounds, loaded = 400, 0  # some must be read and some refused
  for _ in range(rounds):
    damaged = mutated(data, draw, TOKENS)
    replace_file(path, damaged)
    try:
      result = read(str(path))
    except config_lib.ConfigError as e:
      assert len(str(e).splitlines()) == 1 and str(path) in str(e), damaged
      continue
    loaded += 1
    check(result)
  assert 0.02 * rounds < loaded < 0.98 * rounds
