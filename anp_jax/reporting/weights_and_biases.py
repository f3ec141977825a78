"""Weights & Biases, an optional writer of a run's metrics."""

import contextlib
import importlib.util
import os
import secrets
from typing import Any

from absl import logging
import ml_collections

from anp_jax import config as config_lib
from anp_jax.system import error_lines, files

_FOLDER = 'wandb'  # in the workdir, where the package too puts what it writes
_ID_FILE = 'run_id'
_TIMEOUT = 30.0  # seconds for a server, at the start and at the end


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses config.log.wandb where the package is missing.

  Raises:
    ConfigError: naming the command that installs it.
  """
  if config.log.wandb and importlib.util.find_spec('wandb') is None:
    raise config_lib.ConfigError(
      f'config.log.wandb={config.log.wandb!r} needs a package that is not '
      'installed: pip install wandb'
    )


class Writer:
  """Sends metrics to the service; no failure there ends the run."""

  def __init__(self, workdir: str, config: ml_collections.ConfigDict):
    """Starts, or resumes, the W&B run of a workdir.

    Args:
      workdir: folder of the run; nothing is written outside of it.
      config: resolved config; config.log.wandb is 'offline' or 'online'.
    """
    self._run: Any = None
    try:
      self._run = _open(workdir, config)
    except Exception as e:  # noqa: BLE001 - whatever is wrong with the package
      logging.warning('Weights & Biases gets no metrics: %s', error_lines.first_line(e))

  def write(self, kind: str, step: int, values: dict[str, float]) -> None:
    """Adds metrics, named as in TensorBoard."""
    with contextlib.suppress(Exception):  # its service may have died
      self._run.log({f'{kind}/{k}': v for k, v in values.items()}, step=step)

  def close(self) -> None:
    """Ends the W&B run; waits for the server no longer than half a minute."""
    with contextlib.suppress(Exception):
      self._run.finish()


def _open(workdir, config):
  """Starts or resumes the W&B run of a workdir."""
  folder = os.path.abspath(os.path.join(workdir, _FOLDER))
  os.makedirs(folder, exist_ok=True)
  # Read as it is imported. Its settings stay where a person has them.
  for kind in ('CACHE', 'DATA', 'ARTIFACT'):
    os.environ[f'WANDB_{kind}_DIR'] = os.path.join(folder, kind.lower())
  import wandb  # heavy, and optional

  def begin(mode):
    return wandb.init(
      project=os.environ.get('WANDB_PROJECT', 'anp_jax'),
      name=os.path.basename(os.path.abspath(workdir)),
      id=_run_id(folder),
      resume='allow',
      dir=os.path.abspath(workdir),
      mode=mode,
      config=config_lib.flat(config),
      settings=wandb.Settings(
        console='off',
        silent=True,
        disable_git=True,
        x_save_requirements=False,
        init_timeout=_TIMEOUT,
        login_timeout=_TIMEOUT,
        finish_timeout=_TIMEOUT,
      ),
    )

  try:
    return begin(config.log.wandb)
  except Exception as e:  # noqa: BLE001 - no key, no network, no server
    logging.warning(
      'Weights & Biases cannot be reached, metrics go to %s for `wandb sync`: %s',
      folder,
      error_lines.first_line(e),
    )
    return begin('offline')


def _run_id(folder):
  """Returns the id of the workdir, so that a resumed run continues the same W&B run."""
  path = os.path.join(folder, _ID_FILE)
  if not os.path.exists(path):
    files.write_atomic(path, secrets.token_hex(8))
  with open(path) as f:
    return f.read()
