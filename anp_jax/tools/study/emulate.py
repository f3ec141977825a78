"""The flag --emulate of a study: nodes whose computing is a sleep.

Each node is a process of this machine. There may be more nodes than cores, since
they sleep most of the time. The flag's keys are those of config.emulate.
"""

from anp_jax import config as config_lib
from anp_jax.config import emulation_keys
from anp_jax.tools.study import grid, settings, study_runner

_GROUP = 'emulate.'
# Nothing is learnt, so evaluations and saves would only take cores; and many
# processes that start on a few cores need time.
_DEFAULTS = {
  'data.source': 'synthetic',
  'eval.every': '1000000 steps',
  'eval.examples': 'False',
  'checkpoint.every': '1000000 steps',
  'checkpoint.keep_best': '0',
  'cluster.rendezvous_timeout': '900',
  'cluster.heartbeat_timeout': '60',
  'cluster.stall_timeout': '600',
  'log.tensorboard': 'False',
}
# A thread each: they would wake each other on a few cores.
_ONE_THREAD = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')


def overrides(text: str | None, typed: dict[str, str]) -> dict[str, str]:
  """Returns the config's overrides of a study, with those of its emulation.

  Args:
    text: text of --emulate, such as 'step_seconds=0.1,spread=0.05'; None: nothing is emulated.
    typed: texts of --config.KEY=VALUE by dotted key.

  Raises:
    ConfigError: for an unknown key, with the nearest, and for one that is set twice.
  """
  if text is None:
    return typed
  keys = settings.overrides('--emulate', text, _GROUP, typed)
  return _DEFAULTS | keys | {f'{_GROUP}enabled': 'True'}


def reserved(emulated: bool) -> dict[str, str]:
  """Returns the keys of config.emulate that --vary cannot have, and the flag that sets them."""
  # All runs of an emulated study are launched alike, and their page says how.
  names = ('enabled', 'sleep') if emulated else emulation_keys.KEYS
  return {_GROUP + name: '--emulate' for name in names}


def check(study: study_runner.Study, cells: list[grid.Cell]) -> None:
  """Raises ConfigError for a slow process that no cell of the study has."""
  most = max(cell.nodes for cell in cells)
  for process, _ in study.first_config(cells).emulate.get('slow', ()):
    if process >= most:
      raise config_lib.ConfigError(
        f'--emulate: slow={process}: expected a process below {most}, the largest of --nodes'
      )


def environment(study: study_runner.Study) -> dict[str, str]:
  """Returns the variables of a study's processes; {} where they compute."""
  if not study.sleeps:
    return {}
  return dict.fromkeys(_ONE_THREAD, '1')
