"""drawing: names cut to a width, and where a contact sheet puts its cells."""

from matplotlib import figure
import numpy as np
from PIL import Image
import pytest

from anp_jax.system import drawing


@pytest.mark.parametrize(
  'text, width, result',
  [
    ('abcdefghij', 9, 'abcd…ghij'),
    ('abcdefghij', 8, 'abcd…hij'),
    ('abcdefghij', 1, '…'),
    ('abcdefghij', 0, '…'),
  ],
)
def test_fitted(text, width, result):
  assert drawing.fitted(text, width, len) == result


def test_curves_differ_in_colour_and_without():
  looks = drawing.looks([*map(str, range(24)), '0'])
  assert len(looks) == 24
  assert len({(look['marker'], look['linestyle']) for look in looks.values()}) == 24
  assert len({looks[str(i)]['color'] for i in range(6)}) == 6
  assert drawing.looks('a')['a'] == {'color': drawing.BLUE, 'marker': 'o', 'linestyle': '-'}


@pytest.mark.parametrize(
  'sizes, ticks', [([4], [4]), ([8, 1, 2, 8], [1, 2, 8]), ([1, 2, 4, 64, 57], [64, 57, 4])]
)
def test_an_ideal_line_and_sizes_whose_labels_do_not_meet(sizes, ticks):
  axes = figure.Figure().subplots()
  drawing.ideal(axes, sizes, 2.5)
  least, most = min(sizes), max(sizes)
  assert axes.lines[0].get_xydata().tolist() == [[least, 2.5 * least], [most, 2.5 * most]]
  drawing.label_sizes(axes, sizes)
  assert sorted(axes.get_xticks()) == sorted(ticks)


def test_cells_are_in_rows_below_the_title(tmp_path):
  sheet = drawing.ContactSheet(['title', ('more', '#ff0000')], 5, 2, (100, 120))
  corners = [sheet.corner(i) for i in range(5)]
  lefts, uppers = ([*{c[i]: None for c in corners}] for i in (0, 1))
  assert lefts == [16, 16 + 110]
  assert uppers[0] > 16 + 2 * drawing.ContactSheet.LINE
  assert np.diff(uppers).tolist() == [130, 130]
  image = np.arange(5 * 5 * 3, dtype=np.uint8).reshape(5, 5, 3)
  sheet.picture(corners[4], image, 100, '#ff0000')
  sheet.save(str(tmp_path / 'a.png'))
  pixels = np.asarray(Image.open(tmp_path / 'a.png').convert('RGB'))
  x, y = corners[4]
  assert len(pixels) == y + 120 + 16
  box = pixels[y : y + 100, x : x + 100]
  np.testing.assert_array_equal(box, image.repeat(20, 0).repeat(20, 1))
  frame = pixels[y - 4 : y + 104, x - 4 : x + 104]
  assert (frame == (255, 0, 0)).all(-1).sum() == 108**2 - 100**2


def test_a_line_of_a_sheet_is_cut_and_printable(tmp_path):
  sheet = drawing.ContactSheet(['title'], 1, 1, (100, 100))
  sheet.text((20, 60), 'x\n' * 200, 100)
  sheet.save(str(tmp_path / 'a.png'))
  pixels = np.asarray(Image.open(tmp_path / 'a.png').convert('L'))
  rows, columns = np.nonzero(pixels[60:] < 255)
  assert columns.min() >= 20 and columns.max() <= 121 and rows.max() < 19
