"""Shows a data set: examples as the network gets them, or counts of its classes.

python -m anp_jax.data.show --config=configs/resnet_anp.py:demo
python -m anp_jax.data.show --config=... --count=100 --step=500 --output=look
python -m anp_jax.data.show --config=... --stats

Writes training.png and evaluation.png; with --stats it prints counts and
writes nothing. Any --config.KEY=VALUE goes with it, as in main.py.
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.show()

import os

import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, command_line, exits, outputs
from anp_jax.data import index_shuffle, sources, vocabulary
from anp_jax.data.input import augment, batch_sampler, pipeline
from anp_jax.data.show import stats
from anp_jax.data.sources import agreement, balance, source as source_lib

_MAX_COUNT = 1000  # a sheet of more would not open in every viewer
_STREAM = 2  # of random numbers, see `index_shuffle`
# Flags by name: default, metavar and help.
_FLAGS = {
  'config': ('', 'FILE[:VARIANT]', 'recipe; see configs/'),
  'output': ('show', 'DIR', 'folder for the pictures'),
  'count': (36, 'N', 'examples per sheet'),
  'step': (0, 'N', 'training step whose examples are shown (default: 0)'),
  'stats': (False, '', 'counts only, no pictures'),
}
_DRAWING = ('output', 'count', 'step')


@exits.with_status()
def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 2 (bad input), 130 (Ctrl-C)."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # a run may hold the accelerator
  overrides, rest = command_line.split_overrides(argv[1:])
  flags = _parse(rest)
  config = command_line.load(flags.config, overrides)
  if not flags.stats:
    outputs.check_apart('--output', flags.output, config)
  splits = _open(config)
  if flags.stats:
    counts = [stats.count(source) for source in splits]
    print('\n'.join(stats.balance(counts) + stats.tables(counts)), flush=True)
  else:
    for path in _draw(config, splits, flags):
      print(path, flush=True)
  return 0


def examples(
  config: ml_collections.ConfigDict,
  source: source_lib.Source,
  training: bool,
  count: int,
  step: int = 0,
) -> dict:
  """Returns examples as the network gets them, before normalisation and mixing.

  Args:
    config: the run's config.
    source: examples of the split.
    training: whether they are those of a training step and the steps after
      it, augmented; else they are spread over the split.
    count: number of examples; at most all where not training.
    step: training step.

  Returns:
    A batch of `pipeline.batches`: image (n, size, size, 3) uint8, label (n,)
    int32, weight (n,) float32, 0 where a damaged example was replaced.
  """
  # The rows of successive steps are one stretch of the stream, so that a batch
  # longer than a step's holds what several steps do.
  rows = np.arange(count)
  if not training:
    rows = spread(config.seed, min(count, len(source)), len(source))
  sampler = batch_sampler.OneBatch(
    config,
    len(source),
    _batch_size(config),
    rows,
    training,
    step if training else 0,
    order=balance.sampler(config, source) if training else None,
  )
  (batch,) = pipeline.batches(source, sampler)
  if training and augment.is_strong(config):
    from anp_jax.data.input import strong_augment  # JAX, which nothing else here needs

    steps, rows = divmod(sampler.start * sampler.batch_size + rows, sampler.batch_size)
    batch['image'] = strong_augment.of_steps(config, batch['image'], steps, rows)
  return batch


def spread(seed: int, count: int, size: int) -> np.ndarray:
  """Returns indices from all over a split, one of each of `count` stretches.

  They are random: every n-th example of a set whose classes take turns may be
  of one class.

  Args:
    seed: seed of the run.
    count: number of indices, at most `size`.
    size: examples of the split.

  Returns:
    (count,) int64, ascending, all different.
  """
  positions = np.arange(count)
  edges = np.arange(count + 1) * size // count
  draws = index_shuffle.uniform(seed, _STREAM, positions, 1)[:, 0]
  return edges[:-1] + (draws * np.diff(edges)).astype(np.int64)


def _parse(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.data.show', description=__doc__)
  parser.add_flags(_FLAGS)
  flags = parser.parse(arguments, config_lib.known_keys())
  if not flags.config:
    raise config_lib.ConfigError('--config=FILE[:VARIANT] is missing; see configs/')
  for name in _DRAWING if flags.stats else ():
    if getattr(flags, name) != parser.get_default(name):
      raise config_lib.ConfigError(f'--{name} is for drawing, not for --stats')
  if not 1 <= flags.count <= _MAX_COUNT:
    raise config_lib.ConfigError(f'--count={flags.count}: expected 1 to {_MAX_COUNT}')
  if flags.step < 0:
    raise config_lib.ConfigError(f'--step={flags.step}: expected 0 or more')
  if not flags.stats:
    outputs.check_folder('--output', flags.output)
  return flags


def _open(config):
  """The sources of training and of evaluation."""
  splits = [sources.open_source(config, training) for training in (True, False)]
  if not splits[0].has_images:
    raise config_lib.ConfigError(
      f'config.data.source={config.data.source} has nothing to show: it holds no images'
    )
  agreement.check_classes(splits[1], splits[0])
  return splits


def _draw(config, splits, flags):
  """Yields the path of each picture once it is written."""
  from anp_jax.data.show import draw  # heavy: once the input is known

  os.makedirs(flags.output, exist_ok=True)
  for name, source in zip(stats.SPLITS, splits):
    training = name == 'training'
    batch = examples(config, source, training, flags.count, flags.step)
    names = [stats.class_name(source.vocabulary, i) for i in batch['label']]
    title = _title(config, source, training, flags.step, batch)
    path = os.path.join(flags.output, f'{name}.png')
    draw.sheet(path, batch['image'], names, batch['weight'] == 0, title)
    yield path


def _title(config, source, training, step, batch):
  """The lines above a sheet, about its examples and their split."""
  d, count = config.data, len(batch['label'])
  side = f'{source.name}; {d.image_size} x {d.image_size} px'
  if not training:
    total = vocabulary.counted(len(source), 'example')
    return [f'Evaluation: {count:,} of {total}, spread evenly', side]
  last = step + (count - 1) // _batch_size(config)
  steps = f'step {step}' if last == step else f'steps {step} to {last}'
  flip = '' if d.augment == 'none' else f', flip={d.flip:g}'  # none flips nothing either
  lines = [
    f'Training: {vocabulary.counted(count, "example")} of {steps}',
    f'{side}, augment={d.augment}{flip}',
  ]
  if augment.is_strong(config):
    lines.append(
      f'RandAugment: {d.rand_augment_ops} operations, magnitude '
      f'{d.rand_augment_magnitude:g}; erase={d.erase:g}'
    )
  mixed = [f'{k}={d[k]:g}' for k in ('mixup', 'cutmix') if d[k]]
  if mixed:
    lines.append(f'shown unmixed: the device applies {" and ".join(mixed)}')
  return lines


def _batch_size(config):
  return config.batch_size or config.batch_size_per_device
