"""Trains or evaluates an image classifier.

python main.py --config=configs/resnet_anp.py:demo --workdir=runs/demo
python main.py --config=configs/resnet_anp.py --config.batch_size=128
python main.py --config=... --workdir=runs/demo --mode=evaluate
"""

import sys

from absl import flags

from anp_jax import command_line
from anp_jax import config as config_lib
from anp_jax import xla_flags

flags.DEFINE_string('config', None, 'FILE[:VARIANT]; see configs/.')
flags.DEFINE_string('workdir', None, 'Folder of the run; a fresh one if unset.')
flags.DEFINE_enum('mode', 'train', ['train', 'evaluate'], 'What to do.')
flags.DEFINE_string(
  'checkpoint', 'newest', 'What --mode=evaluate scores: newest, best or a step.'
)


def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 1 (failed), 2 (bad input)."""
  try:
    overrides, rest = command_line.split_overrides(argv)
    flags.FLAGS(rest)
    config, workdir = command_line.from_flags(flags.FLAGS, overrides)
  except (flags.Error, config_lib.ConfigError) as e:
    print(f'error: {e}'.replace('\n', ' '), file=sys.stderr)
    return 2

  xla_flags.enable()
  from anp_jax import train  # heavy: only once the input is known to be good

  try:
    train.run(config, workdir, flags.FLAGS.mode, flags.FLAGS.checkpoint)
  except config_lib.ConfigError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  except (train.NotFinite, train.Damaged) as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print(f'\ninterrupted; the same command goes on in {workdir}')
    return 130
  return 0


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  sys.exit(main(sys.argv))
