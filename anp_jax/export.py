"""Exports a trained network for transformers or timm, and as a StableHLO program.

python -m anp_jax.export --checkpoint=runs/demo --output=demo

For a network that transformers has (ResNet, ConvNeXt, tf_efficientnet) it
writes the files that `AutoModelForImageClassification.from_pretrained` loads:
model.safetensors, config.json, preprocessor_config.json. For a network that only
timm has, it writes those that `timm.create_model('local-dir:FOLDER')` loads. For
every network it writes model.stablehlo, which JAX runs without this package, with
labels.json and preprocessing.json.
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.export()

from collections.abc import Iterator
import os

import jax

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, errors, exits, outputs, saved_run, trust, urls
from anp_jax.system import files

# Flags by name: default, metavar and help.
_FLAGS = {
  'checkpoint': ('', 'DIR', 'workdir, a checkpoint in one, or published weights'),
  'labels': ('', 'FILE', 'names of the classes of published weights'),
  'output': ('', 'DIR', 'output folder; created if missing'),
  # Platforms with a backend in JAX itself; it takes rocm as well.
  'platforms': ('cpu,cuda,tpu', 'LIST', 'target platforms of the program'),
}


@exits.with_status()
def main(argv: list[str]) -> None:
  """Exports; the exit status is 0, 2 (bad input) or 130 (Ctrl-C)."""
  flags = _parse(argv[1:])
  # Nothing is computed, so that no accelerator is needed.
  jax.config.update('jax_platforms', 'cpu')
  for line in export(flags.checkpoint, flags.output, flags.platforms, flags.labels):
    print(line, flush=True)


def export(
  checkpoint: str, folder: str, platforms: tuple[str, ...], labels: str = ''
) -> Iterator[str]:
  """Writes all files.

  Args:
    checkpoint: a workdir, a checkpoint in one or published weights.
    folder: folder of the files; made if it is missing.
    platforms: platforms of the program, some of `weights.exported.PLATFORMS`.
    labels: path of the names of the classes of published weights; or ''.

  Yields:
    Lines for people.

  Raises:
    ConfigError: if the checkpoint cannot be read, or the folder holds it or a run.
  """
  # Slow imports: only after the flags are checked.
  from anp_jax.checkpoint.weights import exported, huggingface, pretrained, timm_folder
  from anp_jax.data import vocabulary

  trained, notes = pretrained.find(checkpoint, labels)
  _check_apart(folder, trained.folder)
  yield from notes
  m = trained.config.model
  classes = vocabulary.counted(len(trained.vocabulary), 'class')
  folder_name = urls.remote_url(trained.folder)
  yield f'{folder_name}: {m.name}, {classes}, step {trained.step}'
  os.makedirs(folder, exist_ok=True)
  refusal = huggingface.refusal(trained.config)
  if refusal:
    missing = timm_folder.refusal(trained.config)
    written = [] if missing else list(timm_folder.FILES)
    stale = [
      f for f in huggingface.FILES if f not in written and os.path.exists(os.path.join(folder, f))
    ]
    if stale:
      raise config_lib.ConfigError(
        f'--output={folder!r} holds {stale[0]} of another network, and this '
        f'one has none ({refusal}); choose another folder'
      )
    yield f'nothing for transformers: {refusal}'
    if not missing:
      yield from _sizes(folder, timm_folder.write(trained, folder))
      yield f"timm.create_model('local-dir:{folder}') loads the files"
  else:
    written = huggingface.write(trained, folder)
    yield from _sizes(folder, written)
  if written and huggingface.is_approximate(trained.config):
    yield (
      f'{written[-1]} approximates the evaluation of this run '
      f'(data.decode={trained.config.data.decode!r}), see docs/use.md'
    )
  yield from _sizes(folder, exported.write(trained, folder, platforms))
  yield f'{exported.NAME} is for {", ".join(platforms)}; any number of images'


def _check_apart(folder, source):
  """Refuses to write over a run, or over the weights that are exported."""
  run_file = files.read_json_object(os.path.join(folder, saved_run.FILE))
  is_run = 'strategy.name' in run_file or saved_run.has_checkpoints(folder)
  if is_run or os.path.realpath(folder) in map(os.path.realpath, (source, os.path.dirname(source))):
    raise config_lib.ConfigError(
      f'--output={folder!r} is the folder of a run or of these weights; choose another one'
    )


def _sizes(folder, names):
  for name in names:
    path = os.path.join(folder, name)
    yield f'{path}  {os.path.getsize(path):,} bytes'


def _parse(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.export', description=__doc__)
  parser.add_flags(_FLAGS)
  trust.add_flag(parser)
  flags = parser.parse(arguments)
  for name in ('checkpoint', 'output'):
    if not getattr(flags, name):
      raise config_lib.ConfigError(f'--{name}=DIR is missing')
  outputs.check_folder('--output', flags.output)
  from anp_jax.checkpoint.weights import exported

  flags.platforms = tuple(p.strip() for p in flags.platforms.split(','))
  for name in flags.platforms:
    errors.check_choice(f'--platforms: {name!r}', name, exported.PLATFORMS)
  return flags
