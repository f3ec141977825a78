"""The dtype that config.model.dtype='auto' stands for."""

from anp_jax import config as config_lib
from anp_jax.config import saved_run
from anp_jax.system import onednn, xla_flags


def decide(config, workdir: str):
  """Returns the config with the dtype of the computation, decided once a run.

  It is asked before the processes of a run compare their configs: those of
  unlike machines may not decide alike, and then the run is refused.

  Args:
    config: resolved; its model.dtype may be 'auto'.
    workdir: of the run; one that is resumed keeps its dtype.
  """
  if config.model.dtype != 'auto':
    return config
  dtype = saved_run.read(workdir).get('model.dtype') or _fastest(config)
  return config_lib.replaced(config, {'model.dtype': dtype})


def _fastest(config):
  """bfloat16 on accelerators, and on a CPU that multiplies it faster."""
  if xla_flags.platform() != 'cpu':
    return 'bfloat16'
  opened = None if config.model.cpu_library == 'xla' else onednn.find()
  return 'bfloat16' if opened and 'bfloat16' in opened.dtypes else 'float32'
