"""Names images with a trained network, on any computer.

python -m anp_jax.predict --checkpoint=runs/demo photo.jpg holidays/ --top=5
python -m anp_jax.predict --checkpoint=resnet18.safetensors photo.jpg \
  --labels=names.txt
find . -name '*.jpg' | python -m anp_jax.predict --checkpoint=runs/demo - \
  --output=names.jsonl --sheet=names.png --explain

A path is a file, a folder (all image files in it and below) or -, for a list on
standard input; of a network of features it is a file of them, see docs/anp.md. Rows
are in the order of the paths, as many a file as --top says. A file that cannot be
read is listed on standard error and leaves no row.
Ends with 0 if a file was named, 1 if none could be, 2 for a bad argument.
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.predict()

from collections.abc import Iterable, Iterator
import contextlib
import itertools
import os
import sys
from typing import TYPE_CHECKING

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, errors, exits, outputs, trust, urls
from anp_jax.system import cores, xla_flags

if TYPE_CHECKING:
  from anp_jax.predict import network as network_lib

_FORMATS = ('csv', 'jsonl')
_SUFFIXES = {'.csv': 'csv', '.jsonl': 'jsonl', '.json': 'jsonl', '.ndjson': 'jsonl'}
# Flags by name: default, metavar and help.
_FLAGS = {
  'checkpoint': (
    '',
    'PATH',
    'a workdir, a checkpoint in one; published weights: a .safetensors, .pth or .caffemodel '
    'file, a folder as transformers writes it, package:NAME of an installed package with weights',
  ),
  'labels': ('', 'FILE', 'names of the classes of published weights, one per line'),
  'top': (5, 'N', 'names per file'),
  'output': ('', 'FILE', 'default: standard output'),
  'format': ('', 'NAME', "csv or jsonl (default: by the output's suffix, else csv)"),
  'sentiment': ('', 'FILE', 'VSO or MVSO: how positive a pair is'),
  'emotions': ('', 'FILE', 'MVSO: the emotions of a pair'),
  'explain': (False, '', 'what adjective and noun contribute, and the best of each'),
  'sheet': ('', 'FILE.png', 'the images, named'),
  'features': ('', 'FILE.npz', 'features and logits of the images, to train on (docs/anp.md)'),
  'upright': (False, '', 'turn photographs as their EXIF data say; evaluation does not'),
  'batch_size': (0, 'N', 'images at a time over all devices (default: what suits them)'),
  'threads': (0, 'N', 'threads that read and decode (default: as many as cores)'),
}


@exits.with_status()
def main(argv: list[str]) -> int:
  """Returns the exit status: 0, 1 (none named), 2 (bad input), 130 (Ctrl-C)."""
  flags = _parse(argv[1:])
  if problem := xla_flags.missing_plugin():
    raise config_lib.ConfigError(problem)
  from anp_jax.predict import predict_progress as progress_lib

  xla_flags.enable()
  progress = progress_lib.NamingProgress(sys.stderr)
  try:
    _run(flags, progress)
  except Exception as e:  # JAX says so in an error of its own
    if not isinstance(e, MemoryError) and 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    raise config_lib.ConfigError(
      f'--batch_size={flags.batch_size or "default"}: there is not '
      'enough memory for a batch; expected fewer images'
    ) from e
  progress.finish()
  return 0 if progress.named else 1


def named(network: 'network_lib.Network', batches: Iterable) -> Iterator[tuple]:
  """Names batch after batch; one is read while the device has the next.

  Args:
    network: compiled network.
    batches: batches of `file_batches.batches`.

  Yields:
    (batch, its `network.Names`; None where it has no files).
  """

  def started():
    for batch in batches:
      yield batch, network.start(batch.images) if batch.files else None

  # A pair is there once the device has the batch after it.
  for (batch, result), _ in itertools.pairwise(itertools.chain(started(), [None])):
    yield batch, network.names(result, len(batch.files)) if batch.files else None


def _parse(arguments):
  flags = _parser().parse(arguments)
  if not flags.checkpoint:
    raise config_lib.ConfigError(
      '--checkpoint=PATH is missing: the workdir of a run, or published weights'
    )
  if not flags.paths:
    raise config_lib.ConfigError('expected files, folders or -, for a list on standard input')
  if flags.paths.count('-') > 1:
    raise config_lib.ConfigError('- is given twice, but standard input holds one list')
  for name in ('top', 'threads', 'batch_size'):
    value = getattr(flags, name)
    if value < (name == 'top'):
      raise config_lib.ConfigError(f'--{name}={value}: expected {int(name == "top")} or more')
  _check_outputs(flags)
  return flags


def _check_outputs(flags):
  """Refuses what cannot be written, and names of another format."""
  if flags.format:
    errors.check_choice(f'--format={flags.format!r}', flags.format, _FORMATS)
  suffix = os.path.splitext(flags.output)[1].lower()
  by_name = _SUFFIXES.get(suffix)
  if flags.format and by_name and flags.format != by_name:
    raise config_lib.ConfigError(
      f'--output={flags.output!r} is the name of a {by_name} file, and '
      f'--format={flags.format}: expected one of them'
    )
  if flags.output:
    is_chosen = flags.format or not suffix
    outputs.check_file('--output', flags.output, () if is_chosen else tuple(_SUFFIXES))
  flags.format = flags.format or by_name or 'csv'
  if flags.sheet:
    outputs.check_file('--sheet', flags.sheet, ('.png',))
  if flags.features:
    outputs.check_file('--features', flags.features, ('.npz',))


def _parser():
  parser = argument_parser.Parser(prog='python -m anp_jax.predict', description=__doc__)
  parser.add_argument('paths', nargs='*', metavar='PATHS', help='files, folders, -')
  parser.add_flags(_FLAGS)
  trust.add_flag(parser)
  return parser


def _run(flags, progress):
  """Names all files; heavy modules are imported once the flags are good."""
  from anp_jax.checkpoint.weights import pretrained
  from anp_jax.data.sources import skipped_files
  from anp_jax.models import linear
  from anp_jax.predict import network as network_lib, predict_rows as rows_lib, sheet as sheet_lib
  from anp_jax.system import compile_cache

  trained, notes = pretrained.find(flags.checkpoint, flags.labels)
  if (widths := trained.config.data.get('widths', ())) and flags.sheet:
    raise config_lib.ConfigError(f'--sheet={flags.sheet!r}: features have no images to draw')
  is_fused = linear.is_fused(trained.config, trained.objective.head) and len(widths) == 2
  table = rows_lib.Rows(
    trained.vocabulary, flags.explain, flags.sentiment, flags.emotions, is_fused
  )
  for line in [*notes, *table.notes]:
    progress.line.log(line)
  compile_cache.enable(trained.config)
  top = min(flags.top, len(trained.vocabulary))
  network = network_lib.Network(trained, top, flags.batch_size, keeps_features=bool(flags.features))
  left_out = skipped_files.SkippedFiles()
  batches = _batches(flags, trained, network, progress, left_out)
  pictures = []  # of the sheet: image, file and bars
  feature_files, arrays = [], []
  with contextlib.ExitStack() as stack:
    stack.enter_context(contextlib.closing(batches))
    results = named(network, batches)
    firsts = [*itertools.islice(results, 1)]  # if they fail, an earlier table stays
    stream = sys.stdout.buffer
    if flags.output:
      stream = stack.enter_context(open(flags.output, 'wb'))
    # After an error, too; Ctrl-C ends the process at once.
    stack.callback(_write_features, flags.features, feature_files, arrays)
    # The other files are made even if nobody reads the table any more.
    has_more = (flags.features or flags.sheet) and not flags.output
    goes_on = exits.until_reader_goes if has_more else contextlib.nullcontext

    def write_bytes(data):
      with goes_on():
        stream.write(data)
        stream.flush()

    name = config_lib.printable if not flags.output and sys.stdout.isatty() else str
    write = rows_lib.writer(flags.format, write_bytes, table.columns)
    for batch, names in itertools.chain(firsts, results):
      rows = [table.file_rows(name(f), names, i) for i, f in enumerate(batch.files)]
      write(list(itertools.chain.from_iterable(rows)))
      if flags.sheet:
        room = sheet_lib.MOST - len(pictures)
        # A view of an image would keep its whole batch.
        images = (image.copy() for image in batch.images)
        pictures += itertools.islice(zip(images, batch.files, map(sheet_lib.bars, rows)), room)
      if flags.features and names:
        feature_files += batch.files
        arrays.append(names.arrays)
      progress.add_batch(len(batch.files), batch.unreadable)
  if left_out:
    hints = skipped_files.heif_hints()
    progress.line.log(f'left out: {left_out.text(hints)}')
  if pictures:
    title = _title(trained, progress, len(pictures))
    sheet_lib.write(flags.sheet, *zip(*pictures), title)


def _batches(flags, trained, network, progress, left_out):
  """The batches of all paths: of image files, or of features."""
  from anp_jax.data.input import decode_pillow
  from anp_jax.predict import file_batches

  if widths := trained.config.data.get('widths', ()):
    return file_batches.of_features(flags.paths, network.batch_size, widths)
  if '-' not in flags.paths:
    progress.count_total(file_batches.find(flags.paths))
  return file_batches.batches(
    file_batches.find(flags.paths, sys.stdin.buffer, left_out),
    decode_pillow.eval_decoder(trained.config, flags.upright),
    network.batch_size,
    trained.config.data.image_size,
    flags.threads or cores.count(),
  )


def _write_features(path, names, arrays):
  """Writes a file that `data.sources.features` reads; none if nothing was named."""
  import numpy as np

  from anp_jax.system import files

  if not arrays:
    return
  rows = [*{name: row for row, name in enumerate(names)}.values()]  # a path may come twice
  with files.atomic_path(path) as draft, open(draft, 'wb') as file:
    columns = {name: np.concatenate([batch[name] for batch in arrays])[rows] for name in arrays[0]}
    np.savez(file, names=[names[row] for row in rows], **columns)


def _title(trained, progress, drawn):
  """The lines above a sheet that has this many of the images."""
  from anp_jax.data import vocabulary

  count = vocabulary.counted(progress.named, 'image')
  if drawn < progress.named:
    count = f'the first {drawn} of {count}; {progress.named - drawn:,} left out'
  if progress.failed:
    count += f'; {progress.failed:,} unreadable'
  origin = f'step {trained.step}' if trained.step else 'published weights'
  classes = vocabulary.counted(len(trained.vocabulary), 'class')
  return [
    f'{trained.config.model.name}, {origin}: {count}',
    f'{urls.remote_url(trained.folder)}; {classes}',
  ]
