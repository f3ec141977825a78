"""The page of a run: curves, scores, speed, config, from metrics.jsonl."""

from collections.abc import Mapping
import os

from anp_jax.reporting import report_kit
from anp_jax.reporting.run_page import curves, html, run_tables
from anp_jax.system import files

_FOLDER = 'report'
_FACTS = 'run.json'  # what a later page needs to know of the training
_CURVES = 'curves.png'


def write(
  workdir: str,
  config_text: str,
  summary: Mapping[str, object],
  hardware: Mapping[str, object] | None = None,
) -> str:
  """Writes workdir/report/: curves.png and index.html.

  Args:
    workdir: folder of the run, with metrics.jsonl.
    config_text: resolved config, shown as it is.
    summary: further facts, name to value, in this order.
    hardware: hardware and versions of the run, likewise.

  Returns:
    The scores and the speed as plain aligned text for the terminal.
  """
  train, validation = run_tables.load(workdir)
  folder = os.path.join(workdir, _FOLDER)
  files.unlink_links(folder)
  os.makedirs(folder, exist_ok=True)
  curves.plot(os.path.join(folder, _CURVES), train, validation)
  values = {'config': config_text, 'summary': _pairs(summary), 'hardware': _pairs(hardware or {})}
  files.write_json(os.path.join(folder, _FACTS), values)
  rewrite(workdir, html.newest_evaluation(workdir))
  scores = run_tables.scores(train, validation)
  facts = run_tables.facts(train, validation) + run_tables.changes(workdir) + _pairs(summary)
  text = report_kit.plain([scores, report_kit.facts(facts)])
  return (text or 'nothing was recorded') + '\n'


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
  return dict(_ending(workdir).get('summary', ()))


def rewrite(workdir: str, evaluation: str) -> bool:
  """Writes index.html once more, with an evaluation.

  Args:
    workdir: folder of the run.
    evaluation: folder of the evaluation; '': none.

  Returns:
    Whether there is a page: a run that has not ended has none.
  """
  folder = os.path.join(workdir, _FOLDER)
  files.unlink_links(folder)
  values = _ending(workdir)
  if not values:
    return False
  train, validation = run_tables.load(workdir)
  text = html.page(
    os.path.basename(os.path.abspath(workdir)),
    {
      'Scores': run_tables.scores(train, validation),
      'Run': report_kit.facts(run_tables.run(workdir) + values['summary']),
      'Time': report_kit.facts(run_tables.facts(train, validation) + run_tables.changes(workdir)),
      'Hardware': report_kit.facts(values['hardware']),
    },
    values['config'],
    os.path.join(folder, _CURVES),
    run_tables.durations(workdir, train),
    evaluation,
  )
  files.write_atomic(path(workdir), text)
  return True


def _ending(workdir):
  """The texts that `write` kept of the training; {} where they are not, or not such texts."""
  values = files.read_json_object(os.path.join(workdir, _FOLDER, _FACTS))
  try:
    tables = {
      table: [(str(name), str(text)) for name, text in values[table]]
      for table in ('summary', 'hardware')
    }
    return tables | {'config': str(values['config'])}
  except (KeyError, TypeError, ValueError):
    return {}


def _pairs(facts):
  return [(str(name).replace('_', ' '), run_tables.fact(value)) for name, value in facts.items()]
