"""The content of a run's page: tables, figures, examples."""

import glob
import io
import os

from anp_jax.data import vocabulary
from anp_jax.data.image_files import image_format, images
from anp_jax.data.sources import stored_images
from anp_jax.reporting import report_kit
from anp_jax.reporting.analysis import analysis_page as evaluation_page
from anp_jax.system import drawing, progress

_COLORS = {
  'start': '#56b4e9',
  'compiling': drawing.ORANGE,
  'steps': drawing.BLUE,
  'waiting for input': '#f0e442',
  'evaluating': drawing.GREEN,
  'saving': drawing.PURPLE,
}
# Bytes up to which an image is stored as it is. An example of 64 pixels has fewer.
_FIGURE, _EXAMPLE = 300_000, 15_000
_MOST_MEGAPIXELS = 100
_WRONG = 'Those that the network is surest of, at most one per true and predicted class.'


def page(
  name: str,
  tables: dict[str, report_kit.Table | None],
  config_text: str,
  curves: str,
  times: dict[str, float],
  evaluation: str,
) -> str:
  """Returns the text of index.html.

  Args:
    name: name of the run.
    tables: 'Scores', 'Run' with network and data, 'Time' with speeds, 'Hardware'.
    config_text: resolved config.
    curves: path of a PNG.
    times: seconds by activity.
    evaluation: folder of an evaluation; '': none.
  """
  result = evaluation_page.load(evaluation)
  sections = {
    'Scores': tables['Scores'] or 'None.',
    'Curves': _image_uri(*os.path.split(curves)),
    'Run': tables['Run'],
    'Time': _time(times, tables['Time']),
    'Evaluation': result and _evaluation(result, evaluation),
    'Examples': result and _examples(result, evaluation),
    'Hardware': tables['Hardware'],
    'Config': config_text,
  }
  return report_kit.html(os.path.dirname(__file__), name, sections)


def newest_evaluation(workdir: str) -> str:
  """The folder of a workdir's last complete evaluation; '': there is none."""
  place = os.path.join(glob.escape(workdir), evaluation_page.FOLDER, '*', evaluation_page.SCORES)
  paths = sorted(glob.glob(place), key=os.path.getmtime)
  return os.path.dirname(paths[-1]) if paths else ''


def _time(times, facts):
  """The bar that shows where the time went, and the speeds; None without either."""
  total = sum(times.values())
  segments = []
  for what, seconds in times.items():
    percent = 100 * seconds / total
    segments.append(
      {
        'percent': percent,
        'color': _COLORS.get(what, drawing.GREY),
        'text': f'{what} {progress.duration(seconds)} ({percent:.1f}%)',
      }
    )
  if segments or facts:
    return {'total': progress.duration(total), 'segments': segments, 'facts': facts}
  return None


def _evaluation(result, folder):
  return {
    'data': result['data'],
    'images': vocabulary.counted(result['scores']['examples'], 'image'),
    'step': result['step'],
    'scores': report_kit.facts(evaluation_page.lines(result['scores'])),
    'confusions': result['confusions'] and evaluation_page.confusions(result['confusions']),
    'figures': [
      {
        'title': title,
        'uri': _image_uri(folder, file),
        # Matrices stand side by side, what is wide by itself.
        'is_wide': 'confusion_' not in file,
        'is_drawn': title not in evaluation_page.PHOTOGRAPHS,
      }
      for title, file in evaluation_page.figures(result['files'])
    ],
  }


def _examples(result, folder):
  """The groups of examples that are not empty."""
  groups = []
  for is_right, title, note in (
    (True, 'Right', 'From all over the set.'),
    (False, 'Wrong', _WRONG),
  ):
    examples = []
    for example in result['examples']:
      uri = _image_uri(folder, os.path.join(evaluation_page.EXAMPLES, example['file']), _EXAMPLE)
      if example['right'] == is_right and uri:
        examples.append(example | {'uri': uri})
    if examples:
      groups.append({'title': title, 'note': note, 'examples': examples})
  return groups


def _image_uri(folder, file, limit=_FIGURE):
  """Returns a PNG in a folder as a URI, as JPEG beyond some bytes; None if it is none."""
  try:
    data = stored_images.read_file(os.path.join(folder, file), folder)
    if image_format.sniff(data) != 'PNG':
      return None
    if len(data) <= limit:
      return report_kit.data_uri(data, 'png')
    out = io.BytesIO()
    with images.reading(data, _MOST_MEGAPIXELS) as image:
      image.convert('RGB').save(out, 'JPEG', quality=85)
  except (stored_images.UnusableError, OSError, ValueError):  # gone, or a stranger's
    return None
  return report_kit.data_uri(out.getvalue(), 'jpeg')
