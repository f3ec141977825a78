"""Prepares a folder of images for training: examined, repaired, in few files.

python -m anp_jax.data.prepare --from=photos --name=photos
python -m anp_jax.data.prepare --from=photos --name=photos
    --train_split=train.txt --eval_split=test.txt --lists=anps.txt
python -m anp_jax.data.prepare --from='tar:{split}-*.tar' --name=photos
python -m anp_jax.data.prepare --from=urls.tsv --path=photos --name=photos
python -m anp_jax.data.prepare --from=photos --name=small --shorter_side=256

The fourth fetches photographs: a line of urls.tsv is CLASS, a TAB and a URL.
To train on the set: --config.data.source=tfds:anp_folder/NAME. After an
interruption, run the same command to resume. One host does all the work, in
--workers processes.
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.prepare()

import os
import re
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, errors, exits, outputs
from anp_jax.data.prepare import actions as actions_lib, fetch, folder, worker_pool
from anp_jax.data.sources import listings
from anp_jax.system import cores, interrupts

_FROM = """folder of class folders, with or without split folders; or list:FILE, tar:PATTERN,
hf:PATH, see docs/data.md; or URLS.tsv, whose photographs are fetched to --path"""
# Flags by name: default, metavar and help.
_FLAGS = {
  'overwrite': (
    False,
    '',
    'replace a set of that name that was made from something else, or before files changed',
  ),
  'name': ('', 'NAME', 'name of the set'),
  'data_dir': ('', 'DIR', 'folder of sets (default: $ANP_DATA, else a cache folder)'),
  'workers': (0, 'N', 'worker processes; 0: as many as cores'),
  'path': ('', 'DIR', "where relative paths start (default: the list's folder, else .)"),
  'shard_megabytes': (256, 'N', 'MiB of a file of the set, about'),
  'train_split': ('train', 'SPLIT', 'folder, or file of lines PATH ID'),
  'eval_split': ('validation', 'SPLIT', 'likewise; empty: none, all of a tree is for training'),
  'lists': ('', 'FILES', 'ANPS.txt or ANPS.txt,ADJECTIVES.txt,NOUNS.txt: the classes'),
  'pairs': ('auto', 'yes|no', 'whether the classes are adjective_noun; auto: if words recur'),
  'policy': ('', 'KIND=ACTION,...', 'action per kind of file; see docs/prepare.md'),
  'max_megapixels': (config_lib.MOST_MEGAPIXELS, 'N', 'megapixels above which an image is large'),
  'min_size': (1, 'PIXELS', 'shorter side below which an image is small'),
  'min_count': (1, 'N', 'image count below which a class is rare'),
  'shorter_side': (0, 'PIXELS', 'shorter side to which larger images are reduced; 0: none is'),
  'quality': (90, 'N', 'JPEG quality of reduced photographs'),
}
_LEAST = dict.fromkeys(('min_size', 'min_count', 'shard_megabytes', 'quality'), 1)
_LEAST |= dict.fromkeys(('workers', 'shorter_side'), 0)
_BEST_QUALITY = 100
_INTERRUPTED = 'interrupted; run the same command to resume'


@exits.with_status(_INTERRUPTED)
def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 2 (bad input or a failing policy), 130 (Ctrl-C)."""
  flags = _parse(argv[1:])
  interrupts.set_line(_INTERRUPTED)
  if flags.urls:
    print('\n'.join(fetch.fetch(flags.urls, flags.source)), flush=True)
  print('\n'.join(folder.prepare(flags)))
  return 0


def _parse(arguments):
  flags = _parser().parse(arguments)
  _check(flags)
  flags.urls = ''
  if listings.kind(flags.source) == 'folder':
    if flags.source.endswith(fetch.SUFFIX):
      flags.urls = flags.source
      flags.source = flags.path or flags.source.removesuffix(fetch.SUFFIX)
      outputs.check_folder('--path', flags.source)
    elif flags.path:
      raise config_lib.ConfigError('--path is for --from=list:, tar:, hf: or FILE.tsv')
    flags.path = flags.source  # a tree is named by its path alone
  config = config_lib.base()
  config.data.dir = flags.data_dir
  outputs.check_folder('--data_dir', config_lib.data_dir(config))
  flags.data_dir = os.path.abspath(config_lib.data_dir(config))
  flags.workers = flags.workers or cores.count()
  return flags


def _parser():
  kinds = [
    f'  {kind:<12}{", ".join(actions):<28}{actions_lib.MEANINGS[kind]}\n'
    for kind, actions in actions_lib.POLICIES.items()
  ]
  parser = argument_parser.Parser(
    prog='python -m anp_jax.data.prepare',
    description=__doc__,
    epilog='kinds, and the actions on each, the default first:\n' + ''.join(kinds),
  )
  parser.add_argument('--from', dest='source', required=True, metavar='PATH', help=_FROM)
  parser.add_flags(_FLAGS)
  return parser


def _check(flags):
  if flags.source.startswith('tfds:'):
    raise config_lib.ConfigError(
      f'--from={flags.source}: expected images; such a set is trained on as it is: '
      f'--config.data.source={flags.source}'
    )
  errors.check_choice(f'--pairs={flags.pairs}', flags.pairs, ('auto', 'yes', 'no'))
  for name, least in _LEAST.items():
    value = getattr(flags, name)
    if value < least:
      raise config_lib.ConfigError(f'--{name}={value}: expected {least} or more')
  if flags.quality > _BEST_QUALITY:
    raise config_lib.ConfigError(f'--quality={flags.quality}: expected 1 to {_BEST_QUALITY}')
  most = config_lib.MOST_MEGAPIXELS
  if not 0 < flags.max_megapixels <= most:
    text = f'--max_megapixels={flags.max_megapixels:g}: expected a number above 0, at most {most}'
    raise config_lib.ConfigError(text)
  if not flags.name:
    raise config_lib.ConfigError('--name=NAME is missing: what to call the set')
  # As tfds reads names; one like 1.0.0 would be taken for a version.
  is_version = re.fullmatch(r'[\d.]+', flags.name)
  is_name = re.fullmatch(r'[A-Za-z0-9_][\w.+-]*', flags.name, re.ASCII)
  if is_version or not is_name:
    expected = 'expected letters, digits and _ . + - only, with a letter'
    raise config_lib.ConfigError(f'--name={flags.name!r}: {expected}')


def command() -> None:
  """Runs as a program: python -m anp_jax.data.prepare, anp-prepare."""
  os.environ.update(worker_pool.ENVIRONMENT)
  interrupts.listen()
  interrupts.exit(main(sys.argv))
