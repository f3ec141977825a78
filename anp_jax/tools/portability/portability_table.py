"""What was compiled for several targets, side by side."""

from anp_jax.system import markdown

_STEPS = {'train': 'training', 'eval': 'evaluation'}


def rows(reports: dict[str, dict]) -> list[tuple[str, ...]]:
  """One quantity a row, one target a column.

  Args:
    reports: target's name to what `ahead.inspect` gave.

  Returns:
    Tuples of a quantity's name and its text for each target; '-' where a
    target has none, because it did not compile or sends no such thing.
  """
  results = list(reports.values())
  result = [
    _row('device', results, lambda r: r['device'].replace(' ', '-')),
    _row('devices', results, lambda r: f'{r["devices"]}'),
  ]
  for step, title in _STEPS.items():
    parts = [r[step] | {'devices': r['devices']} for r in results]
    result += [
      _row(f'{title}: {name}', parts, cell) for name, cell in (*_CELLS, *_collectives(parts))
    ]
    result += [
      _row(f'{title}: gradients {text}', parts, _dtypes(f'gradients_{text}'))
      for text in ('asked', 'compiled')
    ]
  return [row for row in result if set(row[1:]) != {'-'}]


def lines(title: str, table: list[tuple], names: list[str]) -> list[str]:
  """The table as text; what differs between targets is marked."""
  all_rows, step = [('', *names, '')], ''
  for name, *cells in table:
    group, _, label = name.rpartition(': ')
    if group != step:
      all_rows.append((group, *[''] * len(cells), ''))
      step = group
    mark = 'differs' if len(set(cells)) > 1 else ''
    all_rows.append(('  ' * bool(group) + label, *cells, mark))
  return [title, *markdown.plain(all_rows, 'l' + 'r' * len(names) + 'l').splitlines()]


def one_line(error: BaseException) -> str:
  """An error's text, without the lines that only explain, in one line."""
  words = str(error).split('\n\n')[0].split()
  return ' '.join(words)[:500] or type(error).__name__


def _row(name, parts, cell):
  cells = []
  for part in parts:
    try:
      cells.append(cell(part))
    except KeyError:
      cells.append('-')
  return (name, *cells)


def _dtypes(key):
  return lambda part: '+'.join(part[key]) or 'none'


_CELLS = (
  ('compiled', lambda p: 'no' if 'why_not' in p else 'yes'),
  ('images', lambda p: f'{p["images"]}'),
  ('GFLOP a device', lambda p: f'{p["flops"] / 1e9:.1f}'),
  ('GFLOP an image', lambda p: f'{p["flops"] * p["devices"] / p["images"] / 1e9:.2f}'),
  ('MB a device', lambda p: _megabytes(p['memory']['together'])),
  ('MB arguments', lambda p: _megabytes(p['memory']['arguments'])),
  ('MB temporary', lambda p: _megabytes(p['memory']['temporary'])),
)


def _collectives(parts):
  """Names and cells of what is asked for, sent, and sent during compute."""
  result = []
  for text in ('asked', 'compiled'):
    keys = dict.fromkeys(
      (r['kind'], r['dtype'], r['conditional']) for part in parts for r in part.get(text, ())
    )
    for kind, dtype, conditional in keys:
      name = f'{text} {kind} {dtype}' + ' now and then' * conditional
      result.append((name, _sent(text, (kind, dtype, conditional))))
  names = ('compute', 'products')
  result += [(f'MB sent during {n}', _overlapping(n)) for n in names]
  return result


def _sent(text, key):
  def cell(part):
    for r in part[text]:
      if (r['kind'], r['dtype'], r['conditional']) == key:
        size = r['bytes']
        # Metrics are some bytes.
        amount = f'{_megabytes(size)} MB' if size >= 5e4 else f'{size} B'
        return f'{r["operations"]} x, {amount}'
    return '-'

  return cell


def _overlapping(what):
  def cell(part):
    sent = sum(r['bytes'] for r in part['compiled'])
    overlapping = sum(r[f'overlapping_{what}'] for r in part['compiled'])
    if not any(r['asynchronous'] for r in part['compiled']):
      return 'synchronous'
    return f'{_megabytes(overlapping)} of {_megabytes(sent)}'

  return cell


def _megabytes(count):
  return f'{count / 1e6:.1f}'
