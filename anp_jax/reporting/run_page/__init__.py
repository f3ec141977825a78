"""The page of a run: curves, scores, speed, config, from metrics.jsonl."""

import os

from anp_jax.data import vocabulary
from anp_jax.reporting import report_kit
from anp_jax.reporting.analysis import analysis_page as evaluation_page
from anp_jax.reporting.run_page import curves, html, run_tables
from anp_jax.system import files, markdown

_FOLDER = 'report'
_FACTS = 'run.json'  # what a later page needs to know of the training
_CURVES = 'curves.png'


def write(workdir: str, config_text: str, summary: dict, hardware: dict | None = None) -> str:
  """Writes workdir/report/: report.md, curves.png and index.html.

  Args:
    workdir: the folder of the run, with metrics.jsonl.
    config_text: the resolved config, shown as it is.
    summary: further facts, name to value, in this order.
    hardware: what it ran on, likewise; for index.html.

  Returns:
    The scores and the speed as plain aligned text for the terminal.
  """
  train, validation = run_tables.load(workdir)
  scores = run_tables.scores(train, validation)
  rows = _facts(workdir, train, validation) + _pairs(summary)
  folder = os.path.join(workdir, _FOLDER)
  os.makedirs(folder, exist_ok=True)
  curves.plot(os.path.join(folder, _CURVES), train, validation)
  values = {'config': config_text, 'summary': _pairs(summary), 'hardware': _pairs(hardware or {})}
  files.write_json(os.path.join(folder, _FACTS), values)
  rewrite(workdir, html.newest_evaluation(workdir))
  texts = [markdown.plain(t, run_tables.align(t)) for t in (scores, rows) if t]
  return '\n\n'.join(texts or ['nothing was recorded']) + '\n'


def exists(workdir: str) -> bool:
  """Returns whether the run's page was written."""
  return os.path.exists(path(workdir))


def path(workdir: str) -> str:
  """Returns the path of the run's page."""
  return os.path.join(workdir, _FOLDER, 'index.html')


def facts(workdir: str) -> dict[str, str]:
  """Returns what the page says of the network and the devices, by name.

  It is {} where the run has not ended, and so has no page.
  """
  values = files.read_json_object(os.path.join(workdir, _FOLDER, _FACTS))
  return dict(values.get('summary', ()))


def rewrite(workdir: str, evaluation: str) -> bool:
  """Writes index.html and report.md once more, with an evaluation.

  Args:
    workdir: of the run.
    evaluation: its folder; '': none.

  Returns:
    Whether there is a page: a run that has not ended has none.
  """
  folder = os.path.join(workdir, _FOLDER)
  try:
    with open(os.path.join(folder, _FACTS), encoding='utf-8') as f:
      values = files.loads(f.read())
  except FileNotFoundError:
    return False
  train, validation = run_tables.load(workdir)
  name, scores = _name(workdir), run_tables.scores(train, validation)
  facts = _facts(workdir, train, validation)
  run = run_tables.run(workdir) + values['summary']
  files.write_atomic(
    os.path.join(folder, 'report.md'),
    _page(name, scores, run + facts, values['config'], evaluation),
  )
  text = html.page(
    name,
    {'scores': scores, 'run': run, 'facts': facts, 'hardware': values['hardware']},
    values['config'],
    os.path.join(folder, _CURVES),
    run_tables.durations(workdir, train),
    evaluation,
  )
  files.write_atomic(path(workdir), text)
  return True


def _facts(workdir, train, validation):
  return run_tables.facts(train, validation) + run_tables.changes(workdir)


def _pairs(facts):
  return [(str(name).replace('_', ' '), run_tables.fact(value)) for name, value in facts.items()]


def _name(workdir):
  return os.path.basename(os.path.abspath(workdir))


def _page(name, scores, facts, config_text, evaluation):
  """The text of report.md."""
  fence = '```'
  blocks = []
  if scores:
    blocks.append(report_kit.Table(scores))
  if facts:
    blocks.append(report_kit.Table([('run', ''), *facts], 'l'))
  blocks += [
    report_kit.Figure('Loss, accuracy, learning rate and images/s over the epochs', 'curves.png'),
    *_evaluation(evaluation),
    '## Config',
    f'{fence}\n{config_text.rstrip()}\n{fence}',
  ]
  return report_kit.text(name, blocks)


def _evaluation(folder):
  """The blocks of report.md about an evaluation; none without one."""
  result = evaluation_page.load(folder) if folder else {}
  if not result:
    return []
  images = vocabulary.counted(result['scores']['examples'], 'image')
  data = markdown.escape(result['data'])
  blocks = [
    '## Evaluation',
    f'{data}: {images}, checkpoint of step {result["step"]}.',
    report_kit.Table([('', ''), *evaluation_page.lines(result['scores'])], 'l'),
  ]
  if result['confusions']:
    blocks.append(evaluation_page.confusions(result['confusions']))
  return blocks
