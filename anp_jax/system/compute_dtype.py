"""The dtype that config.model.dtype='auto' stands for."""

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import errors, saved_run
from anp_jax.system import onednn, xla_flags


def decide(
  config: ml_collections.ConfigDict, workdir: str, platform: str = ''
) -> ml_collections.ConfigDict:
  """Returns the config with the compute dtype, decided once per run.

  The processes of a run compare their configs afterwards: if different machines
  decide differently, the run is refused.

  Args:
    config: resolved config, whose model.dtype may be 'auto'.
    workdir: run folder; a resumed run keeps its dtype.
    platform: where it runs: 'cpu', 'gpu' or 'tpu'; '': here.

  Raises:
    ConfigError: for float64 where JAX would compute in float32 instead.
  """
  for key, value in config_lib.flat(config).items():
    if key.endswith('dtype') and value == 'float64':
      import jax

      words = 'the environment variable JAX_ENABLE_X64=1 with it'
      errors.check(jax.config.jax_enable_x64, key, value, words)
  if config.model.dtype != 'auto':
    return config
  dtype = saved_run.read(workdir).get('model.dtype') or _fastest(config, platform)
  return config_lib.replaced(config, {'model.dtype': dtype})


def _fastest(config, platform):
  """bfloat16 on accelerators, and on a CPU that multiplies it faster."""
  if (platform or xla_flags.platform()) != 'cpu':
    return 'bfloat16'
  opened = None if config.model.cpu_library == 'xla' else onednn.find()
  return 'bfloat16' if opened and 'bfloat16' in opened.dtypes else 'float32'
