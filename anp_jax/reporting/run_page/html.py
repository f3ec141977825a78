"""The page of a run as one file that opens anywhere: no script, no network."""

import base64
import glob
import io
import os
from typing import TYPE_CHECKING

from anp_jax.data import vocabulary
from anp_jax.reporting import telemetry
from anp_jax.reporting.analysis import analysis_page as evaluation_page
from anp_jax.system import drawing

if TYPE_CHECKING:
  import jinja2

_COLORS = {
  'start': '#56b4e9',
  'compiling': drawing.ORANGE,
  'steps': drawing.BLUE,
  'waiting for input': '#f0e442',
  'evaluating': drawing.GREEN,
  'saving': drawing.PURPLE,
}
_FOLDER = os.path.dirname(__file__)
_LARGE = 300_000  # bytes of a figure beyond which it is stored as JPEG
_THUMBNAIL = 128  # pixels
_WRONG = 'Those that the network is surest of, at most one per true and predicted class.'
_CONFUSED = 8  # pairs in the table


def page(
  name: str,
  tables: dict[str, list],
  config_text: str,
  curves: str,
  times: dict[str, float],
  evaluation: str,
) -> str:
  """Returns the text of index.html.

  Args:
    name: name of the run.
    tables: rows of texts by name: 'scores', with a header row; 'run', network
      and data; 'facts', time and speed; 'hardware'. An empty one is left out.
    config_text: resolved config.
    curves: path of a PNG.
    times: seconds by activity.
    evaluation: folder of an evaluation; '': none.
  """
  result = evaluation_page.load(evaluation) if evaluation else {}
  values = {
    **tables,
    'curves': _figure_uri(curves),
    'times': _times(times),
    'evaluation': _evaluation(result, evaluation) if result else None,
    'examples': _examples(result, evaluation) if result else [],
  }
  is_there = {
    'Scores': True,
    'Curves': values['curves'],
    'Run': tables['run'],
    'Time': values['times'] or tables['facts'],
    'Evaluation': values['evaluation'],
    'Examples': values['examples'],
    'Hardware': tables['hardware'],
    'Config': True,
  }
  return template().render(
    name=name,
    titles=[title for title, value in is_there.items() if value],
    total_time=telemetry.elapsed(sum(times.values())),
    config_text=config_text,
    **values,
  )


def newest_evaluation(workdir: str) -> str:
  """The folder of a workdir's last complete evaluation; '': there is none."""
  place = os.path.join(glob.escape(workdir), evaluation_page.FOLDER, '*', evaluation_page.SCORES)
  paths = sorted(glob.glob(place), key=os.path.getmtime)
  return os.path.dirname(paths[-1]) if paths else ''


def template(folder: str = _FOLDER) -> 'jinja2.Template':
  """Returns the jinja2 template index.html.j2 of a folder, which escapes all.

  Args:
    folder: folder of the template, which may use the templates here.
  """
  import jinja2  # 0.1 s, at the end of a run

  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader([folder, _FOLDER]),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=_encodable,
  )
  return environment.get_template('index.html.j2')


def data_uri(data: bytes, kind: str) -> str:
  """Returns an image as a URI that holds its bytes; kind is png, jpeg ..."""
  return f'data:image/{kind};base64,{base64.b64encode(data).decode()}'


def _encodable(value):
  """A text without the halves of characters that a file's name may hold."""
  if type(value) is str:  # and not what is escaped already
    return value.encode('utf-8', 'replace').decode()
  return value


def _times(times):
  """The segments of the bar that shows where the time went."""
  total = sum(times.values())
  segments = []
  for what, seconds in times.items() if total else ():
    percent = 100 * seconds / total
    segments.append(
      {
        'percent': percent,
        'color': _COLORS.get(what, drawing.GREY),
        'text': f'{what} {telemetry.elapsed(seconds)} ({percent:.1f}%)',
      }
    )
  return segments


def _evaluation(result, folder):
  return {
    'data': result['data'],
    'images': vocabulary.counted(result['scores']['examples'], 'image'),
    'step': result['step'],
    'scores': evaluation_page.lines(result['scores']),
    'confusions': result['confusions'][:_CONFUSED],
    'figures': [
      {
        'title': title,
        'uri': _figure_uri(os.path.join(folder, file)),
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
      path = os.path.join(folder, evaluation_page.EXAMPLES, example['file'])
      if example['right'] == is_right and os.path.exists(path):
        examples.append(example | _thumbnail(path))
    if examples:
      groups.append({'title': title, 'note': note, 'examples': examples})
  return groups


def _figure_uri(path):
  """Returns a figure as a URI, a large one as JPEG; None if it is not there."""
  if not os.path.exists(path):
    return None
  return _image_uri(path, is_png=os.path.getsize(path) <= _LARGE)


def _thumbnail(path):
  """Returns an example's image, and whether it is enlarged pixel by pixel."""
  from PIL import Image

  with Image.open(path) as image:
    is_small = max(image.size) <= _THUMBNAIL // 2
  return {'uri': _image_uri(path, is_small, 2 * _THUMBNAIL), 'is_small': is_small}


def _image_uri(path, is_png, most=None):
  """Returns a file as it is, or as JPEG of at most so many pixels a side."""
  if is_png:
    with open(path, 'rb') as f:
      return data_uri(f.read(), 'png')
  from PIL import Image

  with Image.open(path) as image:
    image = image.convert('RGB')
    if most:
      image.thumbnail((most, most))
    out = io.BytesIO()
    image.save(out, 'JPEG', quality=85)
  return data_uri(out.getvalue(), 'jpeg')
