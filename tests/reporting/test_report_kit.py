"""Reports: the same blocks as Markdown and for a terminal."""

from anp_jax.reporting import report_kit

_TABLE = report_kit.Table([('name', 'x'), ('a|b', '10')], caption='Numbers:')


def test_a_page_has_its_blocks_in_order(tmp_path):
  blocks = [
    report_kit.code(['a', 'b']),
    '',
    _TABLE,
    report_kit.bullets(['one', '`two`']),
    report_kit.Figure('speed', 'speed.png'),
  ]
  path = tmp_path / 'page.md'
  report_kit.write(str(path), 'Title', blocks)
  assert path.read_text() == (
    '# Title\n\n    a\n    b\n\nNumbers:\n\n| name | x |\n| --- | ---: |\n| a\\|b | 10 |\n\n'
    '- one\n- `two`\n\n![speed](speed.png)\n'
  )


def test_blocks_for_a_terminal_are_aligned():
  assert report_kit.plain([_TABLE, '', 'end']) == 'Numbers:\n\nname   x\na|b   10\n\nend'
