"""markdown: tables whose cells show as the texts that they are."""

import pytest

from anp_jax.system import markdown

_ROWS = [('', 'images', 'at'), ('a_b', '1,000', 'x'), ('c', '5', 'yy')]


def test_a_markdown_table():
  assert markdown.table(_ROWS, 'lr').splitlines() == [
    '|  | images | at |',
    '| --- | ---: | ---: |',
    '| a_b | 1,000 | x |',
    '| c | 5 | yy |',
  ]
  rule = markdown.table(_ROWS, 'lrl').splitlines()[1]
  assert rule == '| --- | ---: | --- |'
  assert markdown.table(_ROWS).splitlines()[1] == '| --- | --- | --- |'


def test_aligned_plain_text():
  assert markdown.plain(_ROWS, 'lr').splitlines() == [
    '     images  at',
    'a_b   1,000   x',
    'c         5  yy',
  ]
  assert markdown.plain(_ROWS).splitlines() == [
    '     images  at',
    'a_b  1,000   x',
    'c    5       yy',
  ]


@pytest.mark.parametrize(
  'text, escaped',
  [
    ('class_top1', 'class_top1'),
    ('_red_', r'\_red\_'),
    ('2*', r'2\*'),
    ('a|b\n c', r'a\|b c'),
    ('<b>[x](y)`z`\\', r'\<b\>\[x\](y)\`z\`\\'),
  ],
)
def test_a_text_is_no_markup(text, escaped):
  assert markdown.escape(text) == escaped
  line = markdown.table([(text,)]).splitlines()[0]
  assert line == f'| {escaped} |'
