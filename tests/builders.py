"""Small objects that tests of several rooms need: clocks, pictures, trees."""

import csv
import io
import os
import pathlib
import re
import shutil
import signal
import time
import types

import hypothesis
import jax
import ml_collections
import numpy as np
from PIL import Image
import pytest

from anp_jax import config as config_lib
from anp_jax.config import command_line, data_keys
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import delayed_metrics

# Examples of a test of generated inputs; 0: as many as `make test` has time for.
FUZZED = int(os.environ.get('ANP_FUZZ', 0))
_ROOT = pathlib.Path(__file__).resolve().parents[1]


class Clock:
  """A clock that only a test moves: `clock.now += 3`."""

  def __init__(self, now: float = 1000.0):
    self.now = now

  def __call__(self) -> float:
    return self.now


class Terminal(io.StringIO):
  """A terminal that keeps what it was sent."""

  encoding = 'ascii'

  def isatty(self) -> bool:
    return True


def slow(*values):
  """Returns a case of a parametrised test that is marked `slow`."""
  return pytest.param(*values, marks=pytest.mark.slow)


def soak(*values):
  """Returns a case of a parametrised test that is marked `soak`."""
  return pytest.param(*values, marks=pytest.mark.soak)


def editable(config) -> ml_collections.ConfigDict:
  """Returns a copy of a resolved config that a test may write to."""
  # The constructor shares the groups of a config that is not frozen.
  return ml_collections.ConfigDict(config).copy_and_resolve_references()


def config(changes: dict | None = None) -> ml_collections.ConfigDict:
  """Returns the valid config of the defaults and these values, to write to."""
  recipe = config_lib.base()
  recipe.update_from_flattened_dict(changes or {})
  return editable(config_lib.resolved(recipe))


def load(spec: str, typed: dict | None = None) -> ml_collections.ConfigDict:
  """Returns the config of a recipe and what is typed, to write to."""
  return editable(command_line.load(spec, typed or {}))


def tiny_recipe() -> ml_collections.ConfigDict:
  """Returns the tiny recipe, for any source, cut, cache and balance."""
  config = load(str(_ROOT / 'configs' / 'resnet_anp.py:tiny'))
  for key, declared in data_keys.KEYS.items():
    if key not in config.data:
      config.data[key] = declared.default
  return config


def on_small_network(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Changes a config to a network that compiles in a moment."""
  config.model.name = 'tests.user_network:SmallNet'
  config.log.tensorboard = False
  return config


def on_biases(config, **keys) -> ml_collections.ConfigDict:
  """Returns the config of gradients in closed form on small images, with these keys."""
  changes = {
    'model.name': 'tests.small_networks:Biases',
    'model.norm_group': 2,
    'data.synthetic_classes': 5,
    'data.image_size': 8,
    'data.resize': 8,
    'optimizer.name': 'sgd',
    'log.every': '1 steps',
    'log.tensorboard': False,
  }
  return editable(config_lib.replaced(config, changes | keys))


def random_pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
  """Returns (height, width, 3) uint8 noise, which no format compresses."""
  generator = np.random.default_rng(seed)
  return generator.integers(0, 256, (height, width, 3), np.uint8)


def encode_image(image, kind: str = 'PNG', **options) -> bytes:
  """Returns the bytes of an image file.

  Args:
    image: Pillow's, or an array of pixels.
    kind: Pillow's name of the format.
    **options: options of Pillow's `save`.
  """
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  data = io.BytesIO()
  image.save(data, kind, **options)
  return data.getvalue()


def exif(orientation: int) -> bytes:
  """Returns EXIF that names an orientation, for `encode_image`."""
  tags = Image.Exif()
  tags[0x0112] = orientation
  return tags.tobytes()


def write_tree(root: pathlib.Path, files: dict[str, bytes | str]) -> pathlib.Path:
  """Writes files of these contents, by path below the root; returns it."""
  for name, data in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
  return root


def read_tree(root: pathlib.Path) -> dict[str, bytes]:
  """Returns the contents of the files below a folder, by path."""
  return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob('*') if p.is_file()}


def leave_draft(path: pathlib.Path, hours: float = 2) -> pathlib.Path:
  """Leaves a draft of a file, as a process that was killed so long ago has; returns it."""
  draft = path.with_name(f'.{path.name}.{"0f" * 8}')
  draft.write_bytes(b'half')
  os.utime(draft, (time.time() - 3600 * hours,) * 2)
  return draft


def photographs(root: pathlib.Path, train: int, validation: int = 8) -> pathlib.Path:
  """Writes a tree of so many noisy PNG files of two classes; returns its root."""
  files = {
    f'{split}/class_{"ab"[i % 2]}/{i:03}.png': encode_image(random_pixels(32, 32, first + i))
    for split, count, first in (('train', train, 0), ('validation', validation, train))
    for i in range(count)
  }
  return write_tree(root, files)


def rows(path) -> list[dict[str, str]]:
  """Returns the rows of a CSV file."""
  with open(path, newline='', encoding='utf-8') as f:
    return list(csv.DictReader(f))


def write_program(path: pathlib.Path, text: str) -> pathlib.Path:
  """Writes a program of the shell; returns its path."""
  path.write_text(f'#!/usr/bin/env bash\n{text}\n')
  path.chmod(0o755)
  return path


def error_line(capsys, *words) -> str:
  """Returns the one line, with these words, of a command that refuses its input."""
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith('error: ') and err.count('\n') == 1, err
  for word in words:
    assert str(word) in err, err
  return err[:-1]


def refusal(function, *args, **named) -> str:
  """Returns the one line of the ConfigError with which a call refuses its arguments."""
  try:
    function(*args, **named)
  except config_lib.ConfigError as e:
    text = str(e)
    assert len(text.splitlines()) == 1, text
    return text
  raise AssertionError(f'{function} refused nothing')


def assert_refused(words, function, *args, **named) -> str:
  """Asserts that a call is refused in a line with these words; returns the line.

  Args:
    words: texts that the line has, or one regular expression that is found in it.
    function: is called with the arguments that follow.
    *args: arguments of the function.
    **named: named arguments of the function.
  """
  text = refusal(function, *args, **named)
  for pattern in [words] if isinstance(words, str) else [re.escape(str(w)) for w in words]:
    assert re.search(pattern, text), text
  return text


def signal_at(monkeypatch, step: int, number: int = signal.SIGINT) -> None:
  """Sends this process a signal, as Ctrl-C and Slurm do, while a step is computed."""
  real = delayed_metrics.TrainingLog.push

  def push(self, current, values):
    if current == step:
      os.kill(os.getpid(), number)
    return real(self, current, values)

  monkeypatch.setattr(delayed_metrics.TrainingLog, 'push', push)


def use_disk(patch, free: float) -> None:
  """Gives what asks for the room on a disk so many bytes, by pytest's MonkeyPatch."""
  patch.setattr(shutil, 'disk_usage', lambda _: types.SimpleNamespace(free=free))


def use_devices(patch, count: int) -> None:
  """Gives what asks JAX for its devices the first ones only.

  Args:
    patch: pytest's MonkeyPatch, which gives them back.
    count: number of devices.
  """
  devices = jax.devices()[:count]
  patch.setattr(jax, 'devices', lambda: devices)


def train_alone(config, workdir):
  """Trains on the first device alone, as a fixture of any scope may; returns the scores."""
  from anp_jax import train

  with pytest.MonkeyPatch.context() as patch:
    use_devices(patch, 1)
    return train.run(config, str(workdir))


def abstract(state):
  """The shapes, dtypes and shardings of a state."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def batch_sharding(config, data: int, model: int = 1):
  """The sharding of a batch over a mesh of data x model devices."""
  config.mesh.data, config.mesh.model = data, model
  mesh = mesh_lib.create(config, jax.devices()[: data * model])
  return mesh_lib.batch_sharding(mesh)


def fuzzed(examples, *arguments):
  """Makes a test of generated inputs, as many as `make test` has time for."""

  def decorate(test):
    settings = hypothesis.settings(
      max_examples=FUZZED or examples,
      derandomize=not FUZZED,
      deadline=None,
      database=None,
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    return settings(hypothesis.given(*arguments)(test))

  return decorate
