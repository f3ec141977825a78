"""Prepares a folder of images for training: examined, repaired, in few files.

python -m anp_jax.data.prepare --from=photos --name=photos
python -m anp_jax.data.prepare --from=photos --name=photos
    --train_split=train.txt --eval_split=test.txt --lists=anps.txt
python -m anp_jax.data.prepare --from=tfds:NAME

The set is then trained on by --config.data.source=tfds:anp_folder/NAME. A
command that is stopped goes on when it is typed again. Several processes, on
hosts that share a file system, divide the work: start the same command in each
(srun does), or with --process_id and --num_processes.
"""

from anp_jax.system import interrupts

if __name__ == '__main__':
  interrupts.install()  # all else takes time

import os
import re
import sys

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.data.prepare import parts as parts_lib
from anp_jax.data.prepare import plan as plan_lib
from anp_jax.system import cores

_FOLDER_FLAGS = (
  'train_split', 'eval_split', 'lists', 'pairs', 'policy', 'max_megapixels',
  'min_size', 'min_count', 'shard_megabytes',
)  # fmt: skip


def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 2 (bad input or a failing policy)."""
  try:
    flags = _parse(argv[1:])
    interrupts.set_line('interrupted; run the same command to resume')
    if flags.source.startswith('tfds:'):
      from anp_jax.data.prepare import conversion as work
    else:
      from anp_jax.data.prepare import folder as work
    lines = work.prepare(flags)
  except (config_lib.ConfigError, OSError) as e:
    parts_lib.say(f'error: {e}'.replace('\n', ' '))
    return 2
  except KeyboardInterrupt:  # of a program that calls this one
    parts_lib.say('\ninterrupted; run the same command to resume')
    return 130
  print('\n'.join(lines))
  return 0


def _parse(arguments):
  parser = _parser()
  flags = parser.parse(arguments)
  if flags.source.startswith('tfds:'):
    for name in _FOLDER_FLAGS:
      if getattr(flags, name) != parser.get_default(name):
        raise config_lib.ConfigError(
          f'--{name} is for folders of images, not for --from={flags.source}'
        )
  elif flags.from_dir:
    raise config_lib.ConfigError('--from_dir is for --from=tfds:NAME')
  _check(flags)
  config = config_lib.base()
  config.data.dir = flags.data_dir
  flags.data_dir = os.path.abspath(config_lib.data_dir(config))
  command_line.check_folder('--data_dir', flags.data_dir)
  flags.share = _share(flags)
  return flags


def _parser():
  kinds = [
    (kind, ', '.join(actions), plan_lib.MEANINGS[kind])
    for kind, actions in plan_lib.POLICIES.items()
  ]
  parser = command_line.Parser(
    prog='python -m anp_jax.data.prepare',
    description=__doc__,
    epilog='kinds, and what may be done about each, the default first:\n'
    + '\n'.join(f'  {k:<12}{a:<28}{m}' for k, a, m in kinds),
  )
  add = parser.add_argument
  add(
    '--from',
    dest='source',
    required=True,
    metavar='PATH',
    help='folder of class folders, with or without split folders; or '
    'tfds:NAME, a prepared set of TFRecord files, which is copied as '
    'ArrayRecord',
  )
  add(
    '--name',
    metavar='NAME',
    help='of the set (default for tfds:NAME: NAME_array_record)',
  )
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
    '--train_split',
    default='train',
    metavar='SPLIT',
    help='folder, or file of lines PATH ID (default: %(default)s)',
  )
  add(
    '--eval_split',
    default='validation',
    metavar='SPLIT',
    help='likewise; empty for none, then a tree without split folders is '
    'taken whole (default: %(default)s)',
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
    help='whether the classes are adjective_noun; auto: if words recur '
    '(default: %(default)s)',
  )
  add(
    '--policy',
    default='',
    metavar='KIND=ACTION,...',
    help='what to do about a kind of file, see the table in the docs',
  )
  add(
    '--max_megapixels',
    type=float,
    default=config_lib.base().data.max_megapixels,
    metavar='N',
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
    '--process_id',
    type=int,
    metavar='I',
    help='of this process, from 0 on (default: from Slurm, else 0)',
  )
  add(
    '--num_processes',
    type=int,
    metavar='N',
    help='that share the work (default: from Slurm, else 1)',
  )
  add(
    '--overwrite',
    action='store_true',
    help='replace a set of that name that was made from something else, or '
    'before files changed',
  )
  return parser  # fmt: skip


def _check(flags):
  for name, least in (
    ('min_size', 1), ('min_count', 1), ('shard_megabytes', 1), ('workers', 0),
  ):  # fmt: skip
    value = getattr(flags, name)
    if value < least:
      raise config_lib.ConfigError(
        f'--{name}={value}: expected {least} or more'
      )
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
    not re.fullmatch(r'[A-Za-z0-9_][\w.+-]*', name, re.ASCII)
    or re.fullmatch(r'[\d.]+', name)
  ):
    raise config_lib.ConfigError(
      f'--name={name!r}: expected letters, digits and _ . + - only, with a '
      'letter'
    )


def _share(flags):
  """Who this process is: from its flags, else from Slurm."""
  process_id, count = flags.process_id, flags.num_processes
  if (process_id is None) != (count is None):
    raise config_lib.ConfigError(
      '--process_id and --num_processes: give both or none'
    )
  if process_id is None:
    process_id, count = _slurm()
  if not 0 <= process_id < count:
    raise config_lib.ConfigError(
      f'--process_id={process_id}: expected 0 to {count - 1}, of '
      f'--num_processes={count}'
    )
  return parts_lib.Share(process_id, count, flags.workers or cores.count())


def _slurm():
  # A batch script has these variables too, but is one process of its job.
  e = os.environ
  alone = 'SLURM_JOB_ID' in e and not {'SLURM_STEP_ID', 'SLURM_STEPID'} & set(e)
  count, process_id = e.get('SLURM_NTASKS', ''), e.get('SLURM_PROCID', '')
  if alone or not count.isdigit() or not process_id.isdigit():
    return 0, 1
  return (int(process_id), int(count)) if int(count) > 1 else (0, 1)


if __name__ == '__main__':
  interrupts.listen()
  interrupts.exit(main(sys.argv))
