"""Measurements of a run's devices, kept in its workdir for when it is resumed."""

import json
import os
from typing import Any

import jax

from anp_jax import cluster, models
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.calibration import timing as timing_lib
from anp_jax.system import files, onednn
from anp_jax.training import run_spec

_FORMAT = 6  # version of the files


def load(workdir: str, name: str, key: dict, processes: cluster.Processes) -> dict[str, Any] | None:
  """Reads what `save` has kept under the same key; None without it. All processes call it."""
  saved = {} if processes.index else files.read_json_object(os.path.join(workdir, name))
  # The first one decides for all: its library may be another one than here.
  saved, first_key = processes.gather((saved, key))[0]
  return saved if saved.get('key') == first_key else None


def save(
  workdir: str, name: str, key: dict, values: dict[str, Any], processes: cluster.Processes
) -> None:
  """Keeps JSON values in a file of the workdir, under a key from `key`."""
  if not processes.index:
    # A trial's workdir may not be there yet.
    os.makedirs(workdir, exist_ok=True)
    files.write_json(os.path.join(workdir, name), {'key': key, **values})


def key(spec: run_spec.RunSpec, processes: cluster.Processes) -> dict[str, Any]:
  """Returns what all measurements depend on, as JSON; another key needs new ones."""
  config, mesh = spec.config, spec.mesh
  devices = timing_lib.devices(mesh, processes)
  model = json.loads(config.model.to_json())
  # The key has the library that is opened, rather than its setting.
  del model['cpu_library']
  target = models.target(config, mesh_lib.platform(mesh), jax.local_device_count())
  opened = onednn.opened() if target == onednn.PLATFORM else None
  return {
    'library': opened.describe() if opened else '',
    'format': _FORMAT,
    'jax': jax.__version__,
    'devices': [list(device) for row in devices for device in row],
    'mesh': list(mesh.devices.shape),
    'images': [spec.batch_size // mesh_lib.batch_devices(mesh), config.accumulate],
    'outputs': spec.objective.head.outputs,
    'reduce_dtype': config.strategy.reduce_dtype,
    'model': model,
    'image_size': config.data.image_size,
  }
