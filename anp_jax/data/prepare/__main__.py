"""Prepares a folder of images for training: examined, repaired, in few files.

python -m anp_jax.data.prepare --from=photos --name=photos
python -m anp_jax.data.prepare --from=photos --name=photos
    --train_split=train.txt --eval_split=test.txt --lists=anps.txt
python -m anp_jax.data.prepare --from='tar:{split}-*.tar' --name=photos
python -m anp_jax.data.prepare --from=tfds:NAME

To train on the set: --config.data.source=tfds:anp_folder/NAME. After an
interruption, run the same command to resume. One host does all the work, in
--workers processes.
"""

from anp_jax.system import interrupts

if __name__ == '__main__':
  interrupts.install()  # all else takes time

import os
import re
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, outputs
from anp_jax.data.prepare import actions as plan_lib
from anp_jax.data.sources import listings
from anp_jax.system import cores

_FOLDER_FLAGS = (
  'path',
  'train_split',
  'eval_split',
  'lists',
  'pairs',
  'policy',
  'max_megapixels',
  'min_size',
  'min_count',
  'shard_megabytes',
)
_INTERRUPTED = 'interrupted; run the same command to resume'


def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 2 (bad input or a failing policy)."""
  try:
    flags = _parse(argv[1:])
    interrupts.set_line(_INTERRUPTED)
    if flags.source.startswith('tfds:'):
      from anp_jax.data.prepare import conversion as preparation
    else:
      from anp_jax.data.prepare import folder as preparation
    lines = preparation.prepare(flags)
  except (config_lib.ConfigError, OSError) as e:
    _say(f'error: {e}'.replace('\n', ' '))
    return 2
  except KeyboardInterrupt:  # of a program that calls this one
    _say(f'\n{_INTERRUPTED}')
    return 130
  print('\n'.join(lines))
  return 0


def _say(line):
  """Prints a message for people, where results do not go."""
  print(line, file=sys.stderr, flush=True)


def _parse(arguments):
  _refuse_several_processes(arguments)
  parser = _parser()
  flags = parser.parse(arguments)
  if flags.source.startswith('tfds:'):
    for name in _FOLDER_FLAGS:
      if getattr(flags, name) != parser.get_default(name):
        raise config_lib.ConfigError(
          f'--{name} is for images in files, not for --from={flags.source}'
        )
  elif listings.kind(flags.source) == 'folder' and flags.path:
    raise config_lib.ConfigError('--path is for --from=list:, tar: or hf:')
  elif flags.from_dir:
    raise config_lib.ConfigError('--from_dir is for --from=tfds:NAME')
  _check(flags)
  config = config_lib.base()
  config.data.dir = flags.data_dir
  outputs.check_folder('--data_dir', config_lib.data_dir(config))
  flags.data_dir = os.path.abspath(config_lib.data_dir(config))
  flags.workers = flags.workers or cores.count()
  return flags


def _refuse_several_processes(arguments):
  """Refuses several processes, which once shared a preparation."""
  flags = [a.partition('=')[0] for a in arguments]
  causes = [f for f in flags if f in ('--process_id', '--num_processes')]
  tasks = _slurm_tasks()
  if tasks > 1:
    causes.append(f'srun with {tasks} tasks')
  if causes:
    raise config_lib.ConfigError(
      f'{causes[0]}: several processes no longer share a preparation; start '
      'the command once, on one host, with --workers=N'
    )


def _slurm_tasks():
  """The number of tasks that srun started this command in; 1 without it."""
  e = os.environ
  # A batch script has these variables too, but is one process of its job.
  is_step = 'SLURM_STEP_ID' in e or 'SLURM_STEPID' in e
  count = e.get('SLURM_NTASKS', '')
  if 'SLURM_JOB_ID' in e and not is_step or 'SLURM_PROCID' not in e:
    return 1
  return int(count) if count.isdigit() else 1


def _parser():
  kinds = [
    (kind, ', '.join(actions), plan_lib.MEANINGS[kind])
    for kind, actions in plan_lib.POLICIES.items()
  ]
  parser = argument_parser.Parser(
    prog='python -m anp_jax.data.prepare',
    description=__doc__,
    epilog='kinds, and the actions on each, the default first:\n'
    + '\n'.join(f'  {k:<12}{a:<28}{m}' for k, a, m in kinds),
  )
  _add_places(parser.add_argument)
  _add_splits(parser.add_argument)
  _add_policy(parser.add_argument)
  return parser


def _add_places(add):
  """Adds the flags of the input, the output and the workers."""
  add(
    '--from',
    dest='source',
    required=True,
    metavar='PATH',
    help='folder of class folders, with or without split folders; '
    'list:FILE, tar:PATTERN or hf:PATH, see docs/data.md; or tfds:NAME, a '
    'prepared set of TFRecord files, which is copied as ArrayRecord',
  )
  add(
    '--path',
    default='',
    metavar='DIR',
    help='where relative paths of list:, tar: and hf: start (default: the '
    "list's folder, else the current one)",
  )
  add('--name', metavar='NAME', help='of the set (default for tfds:NAME: NAME_array_record)')
  add(
    '--data_dir',
    default='',
    metavar='DIR',
    help='where sets live (default: $ANP_DATA, else a cache folder)',
  )
  add(
    '--from_dir',
    default='',
    metavar='DIR',
    help='where the set of tfds:NAME lives (default: data_dir)',
  )
  add(
    '--shard_megabytes',
    type=int,
    default=256,
    metavar='N',
    help='MiB of a file of the set, about (default: %(default)s)',
  )
  add(
    '--workers',
    type=int,
    default=0,
    metavar='N',
    help='worker processes (default: 0, as many as cores)',
  )
  add(
    '--overwrite',
    action='store_true',
    help='replace a set of that name that was made from something else, or before files changed',
  )


def _add_splits(add):
  """Adds the flags of the files and their classes."""
  add(
    '--train_split',
    default='train',
    metavar='SPLIT',
    help='folder, or file of lines PATH ID (default: %(default)s)',
  )
  add(
    '--eval_split',
    default='validation',
    metavar='SPLIT',
    help='likewise; empty for none, then all of a tree without split folders '
    'is for training (default: %(default)s)',
  )
  add(
    '--lists',
    default='',
    metavar='FILES',
    help='ANPS.txt or ANPS.txt,ADJECTIVES.txt,NOUNS.txt: the classes',
  )
  add(
    '--pairs',
    default='auto',
    choices=('auto', 'yes', 'no'),
    help='whether the classes are adjective_noun; auto: if words recur (default: %(default)s)',
  )


def _add_policy(add):
  """Adds the flags of unusual files, and of the actions on them."""
  add(
    '--policy',
    default='',
    metavar='KIND=ACTION,...',
    help='what to do about a kind of file, see the table in the docs',
  )
  add(
    '--max_megapixels',
    type=float,
    metavar='N',
    default=config_lib.MOST_MEGAPIXELS,
    help='an image of more million pixels is large (default: %(default)s)',
  )
  add(
    '--min_size',
    type=int,
    default=1,
    metavar='PIXELS',
    help='a shorter side below this is small (default: %(default)s)',
  )
  add(
    '--min_count',
    type=int,
    default=1,
    metavar='N',
    help='a class with fewer images is rare (default: %(default)s)',
  )


def _check(flags):
  for name, least in (('min_size', 1), ('min_count', 1), ('shard_megabytes', 1), ('workers', 0)):
    value = getattr(flags, name)
    if value < least:
      raise config_lib.ConfigError(f'--{name}={value}: expected {least} or more')
  if not 0 < flags.max_megapixels <= config_lib.MOST_MEGAPIXELS:
    raise config_lib.ConfigError(
      f'--max_megapixels={flags.max_megapixels:g}: expected above 0, at most '
      f'{config_lib.MOST_MEGAPIXELS}'
    )
  name = flags.name
  if name is None and not flags.source.startswith('tfds:'):
    raise config_lib.ConfigError('--name=NAME is missing: what to call the set')
  # As tfds reads names; one like 1.0.0 would be taken for a version.
  if name is not None and (
    not re.fullmatch(r'[A-Za-z0-9_][\w.+-]*', name, re.ASCII) or re.fullmatch(r'[\d.]+', name)
  ):
    raise config_lib.ConfigError(
      f'--name={name!r}: expected letters, digits and _ . + - only, with a letter'
    )


def command() -> None:
  """Runs as a program: python -m anp_jax.data.prepare, anp-prepare."""
  interrupts.listen()
  interrupts.exit(main(sys.argv))


if __name__ == '__main__':
  command()
