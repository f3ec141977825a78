"""The page of a run as one file that opens anywhere: no script, no network."""

import base64
import glob
import html
import io
import os

from anp_jax.data import vocabulary
from anp_jax.reporting import telemetry
from anp_jax.reporting.analysis import page as evaluation_page
from anp_jax.system import drawing

_COLORS = {
  'start': '#56b4e9', 'compiling': drawing.ORANGE, 'steps': drawing.BLUE,
  'waiting for input': '#f0e442', 'evaluating': drawing.GREEN,
  'saving': drawing.PURPLE,
}  # fmt: skip
_LARGE = 300_000  # bytes of a figure beyond which it is stored as JPEG
_THUMBNAIL = 128  # pixels
_CONFUSED = 8  # pairs in the table

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5c5c5c;
  --paper: #fff; --card: #f5f6f7; --line: #dcdfe2; --right: #00795a;
  --wrong: #b84a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a8adb2;
  --paper: #16181a; --card: #212427; --line: #383c40; --right: #35c79b;
  --wrong: #ff9350; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 68rem;
  color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); font-size: .9rem; }
nav { margin: .5rem 0 0; font-size: .95rem; }
nav a { margin-right: .9rem; white-space: nowrap; color: inherit; }
.wide { overflow-x: auto; margin-top: .9rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: break-word; } th { font-weight: 600; white-space: nowrap; }
 .numbers td, .numbers th + th {
  text-align: right; padding-left: .6rem; white-space: nowrap; }
figure { margin: 0; padding: .5rem; background: #fff; border-radius: .5rem;
  border: 1px solid var(--line); overflow-x: auto; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figure img { min-width: min(30rem, 160%); }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.figures > div { min-width: 0; } .figures > .row { grid-column: 1 / -1; }
.beside { display: flex; flex-wrap: wrap; gap: 0 4rem; }
.examples { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(8.2rem, 1fr)); }
.examples div { background: var(--card); border-radius: .5rem; padding: .5rem;
  font-size: .82rem; line-height: 1.35; overflow-wrap: anywhere; }
.examples img { width: 100%; aspect-ratio: 1; border-radius: .3rem;
  display: block; margin-bottom: .4rem; }
.examples img.small { image-rendering: pixelated; }
.right { color: var(--right); } .wrong { color: var(--wrong); }
.bar { display: flex; height: 2rem; border-radius: .4rem; overflow: hidden; }
.bar div { min-width: 2px; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .6rem 0 0;
  padding: 0; list-style: none; font-size: .92rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right:
  .4rem; border-radius: .2rem; }
details { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: .82rem; margin: .6rem 0 0; }
"""


def page(
  name: str, scores: list, facts: list, hardware: list, config_text: str,
  curves: str, times: dict[str, float], evaluation: str,
) -> str:  # fmt: skip
  """The text of index.html.

  Args:
    name: of the run.
    scores: rows of a table, the first its head; [] if there is none.
    facts: (name, text) of speed and network.
    hardware: (name, text) of what it ran on.
    config_text: the resolved config.
    curves: path of a PNG.
    times: what to its seconds.
    evaluation: folder of one; '': none.
  """
  said = evaluation_page.load(evaluation) if evaluation else {}
  sections = [
    ('Scores', _table(scores, css='numbers') if scores else '<p>None.</p>'),
    ('Curves', _figure(curves, 'Loss, accuracy, learning rate and images/s '
                       'over the epochs')),
    ('Time', _times(times) + _table(facts)),
  ]  # fmt: skip
  if said:
    sections += [
      ('Evaluation', _evaluation(said, evaluation)),
      ('Examples', _examples(said, evaluation)),
    ]
  sections += [
    ('Hardware', _table(hardware)),
    ('Config', f'<details><summary>All keys</summary><pre>'
     f'{_safe(config_text)}</pre></details>'),
  ]  # fmt: skip
  sections = [(title, text) for title, text in sections if text]
  links = ' '.join(f'<a href="#{t.lower()}">{t}</a>' for t, _ in sections)
  body = '\n'.join(
    f'<section id="{title.lower()}">\n<h2>{title}</h2>\n{text}\n</section>'
    for title, text in sections
  )
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{_safe(name)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_safe(name)}</h1>
<nav>{links}</nav>
{body}
</body>
</html>
"""


def newest_evaluation(workdir: str) -> str:
  """The folder of a workdir's last whole evaluation; '' if there is none."""
  place = os.path.join(
    glob.escape(workdir), evaluation_page.FOLDER, '*', evaluation_page.SCORES
  )
  found = sorted(glob.glob(place), key=os.path.getmtime)
  return os.path.dirname(found[-1]) if found else ''


def _times(times):
  """A bar of where the time went, and its key."""
  whole = sum(times.values())
  if not whole:
    return ''
  parts, key = [], []
  for what, seconds in times.items():
    color = _COLORS.get(what, drawing.GREY)
    share = 100 * seconds / whole
    text = f'{_safe(what)} {telemetry.elapsed(seconds)} ({share:.1f}%)'
    parts.append(
      f'<div style="flex: {share:.3f}; background: {color}" title="{text}">'
      '</div>'
    )
    key.append(f'<li><i style="background: {color}"></i>{text}</li>')
  return (
    f'<p>{telemetry.elapsed(whole)} in all.</p>'
    f'<div class="bar" role="img" aria-label="Where the time went">'
    f'{"".join(parts)}</div><ul class="key">{"".join(key)}</ul>'
  )


def _evaluation(said, folder):
  images = vocabulary.counted(said['scores']['examples'], 'image')
  parts = [
    f'<p class="soft">{_safe(said["data"])}: {images}, checkpoint of '
    f'step {said["step"]}.</p>',
    _table(evaluation_page.lines(said['scores'])),
  ]
  confusions = said['confusions'][:_CONFUSED]
  if confusions:
    rows = [(a, b, str(n)) for a, b, n in confusions]
    parts.append(_table([('most confused', 'called', 'times'), *rows], True))
  drawn = []
  for title, file in evaluation_page.figures(said['files']):
    path = os.path.join(folder, file)
    # Matrices stand side by side, what is wide by itself.
    css = '' if 'confusion_' in file else ' class="row"'
    drawn.append(
      f'<div{css}><h3>{_safe(title)}</h3>{_figure(path, title)}</div>'
    )
  return (
    f'{parts[0]}<div class="beside">{"".join(parts[1:])}</div>'
    f'<div class="figures">{"".join(drawn)}</div>'
  )


def _examples(said, folder):
  groups = []
  for is_right, title, note in (
    (True, 'Right', 'From all over the set.'),
    (False, 'Wrong', 'Those that the network is surest of, one of a kind.'),
  ):
    cards = [
      _card(example, folder)
      for example in said['examples']
      if example['right'] == is_right and os.path.exists(_file(example, folder))
    ]
    if cards:
      groups.append(
        f'<h3>{title}</h3><p class="soft">{note}</p>'
        f'<div class="examples">{"".join(cards)}</div>'
      )
  return ''.join(groups)


def _file(example, folder):
  return os.path.join(folder, evaluation_page.EXAMPLES, example['file'])


def _card(example, folder):
  data, kind, is_small = _thumbnail(_file(example, folder))
  certain = f'{100 * example["probability"]:.0f}%'
  label, predicted = _safe(example['label']), _safe(example['predicted'])
  text = f'<span class="right">{label}</span> {certain}'
  if not example['right']:
    text = f'{label}<br><span class="wrong">called {predicted}</span> {certain}'
  css = ' class="small"' if is_small else ''
  return (
    f'<div title="{_safe(example["where"])}"><img{css} '
    f'src="{_uri(data, kind)}" alt="{label}">{text}</div>'
  )


def _table(rows, head=False, css=''):
  """Rows of texts; the first is a head where its first cell is empty."""
  if not rows:
    return ''
  lines = []
  for i, row in enumerate(rows):
    is_head = not i and (head or not row[0])
    cells = ''.join(
      f'<{tag}>{_safe(cell)}</{tag}>'
      for j, cell in enumerate(row)
      for tag in ['th' if is_head or not j else 'td']
    )
    lines.append(f'<tr>{cells}</tr>')
  return (
    f'<div class="wide"><table class="{css}">{"".join(lines)}</table></div>'
  )


def _figure(path, title):
  if not os.path.exists(path):
    return ''
  uri = _uri(*_picture(path))
  return f'<figure><img src="{uri}" alt="{_safe(title)}"></figure>'


def _picture(path):
  """A figure's bytes and format; a large one, of photographs, as JPEG."""
  if os.path.getsize(path) > _LARGE:
    return _jpeg(path), 'jpeg'
  with open(path, 'rb') as f:
    return f.read(), 'png'


def _thumbnail(path):
  """An example's bytes and format, and whether its pixels are to be seen."""
  from PIL import Image

  with Image.open(path) as image:
    is_small = max(image.size) <= _THUMBNAIL // 2
  if is_small:
    with open(path, 'rb') as f:
      return f.read(), 'png', True
  return _jpeg(path, _THUMBNAIL * 2), 'jpeg', False


def _jpeg(path, most=None):
  from PIL import Image

  with Image.open(path) as image:
    image = image.convert('RGB')
    if most:
      image.thumbnail((most, most))
    out = io.BytesIO()
    image.save(out, 'JPEG', quality=85)
  return out.getvalue()


def _uri(data, kind):
  return f'data:image/{kind};base64,{base64.b64encode(data).decode()}'


def _safe(text):
  """A user's text as text: no markup, no half of a character."""
  return html.escape(str(text).encode('utf-8', 'replace').decode())
