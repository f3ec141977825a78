"""The transpose that turns a photograph upright, as its EXIF data say."""

import warnings

from PIL import Image

_TRANSPOSES = {
  2: Image.Transpose.FLIP_LEFT_RIGHT,
  3: Image.Transpose.ROTATE_180,
  4: Image.Transpose.FLIP_TOP_BOTTOM,
  5: Image.Transpose.TRANSPOSE,
  6: Image.Transpose.ROTATE_270,
  7: Image.Transpose.TRANSVERSE,
  8: Image.Transpose.ROTATE_90,
}
_TAG = 0x0112


def transpose(image: Image.Image) -> Image.Transpose | None:
  """The transpose that makes an opened image upright; None: none is known."""
  # Not image.getexif(): it also believes XMP, which programs that turn
  # pictures forget to change. (TIFF is turned while it is loaded.)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      exif = Image.Exif()
      exif.load(image.info.get('exif') or b'')
      return _TRANSPOSES.get(exif.get(_TAG, 0))
  except Exception:  # noqa: BLE001 - a damaged directory
    return None


def swaps_sides(transpose: Image.Transpose | None) -> bool:
  """Whether height and width change places."""
  return transpose in (_TRANSPOSES[5], _TRANSPOSES[6], _TRANSPOSES[7], _TRANSPOSES[8])
