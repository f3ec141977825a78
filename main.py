"""Trains or evaluates an image classifier.

python main.py --config=configs/resnet_anp.py:demo --workdir=runs/demo
python main.py --workdir=runs/demo --mode=evaluate
srun python main.py ...    # or mpirun, or see docs/clusters.md
"""

import os
import sys

from absl import flags

from anp_jax import cluster
from anp_jax import command_line
from anp_jax import config as config_lib
from anp_jax import xla_flags

flags.DEFINE_string('config', None, 'FILE[:VARIANT]; see configs/.')
flags.DEFINE_string('workdir', None, 'Folder of the run; a fresh one if unset.')
flags.DEFINE_enum('mode', 'train', ['train', 'evaluate'], 'What to do.')
flags.DEFINE_string('checkpoint', 'newest', 'To score: newest, best, a step.')
flags.DEFINE_string('output', '', 'Where --mode=evaluate writes its files.')
# Several processes; Slurm, Open MPI and TPU pods need none of these.
flags.DEFINE_string('coordinator', None, 'HOST:PORT where process 0 is met.')
flags.DEFINE_integer('num_processes', None, 'Of the run, on all hosts.')
flags.DEFINE_integer('process_id', None, 'Of this process, from 0.')


def main(argv: list[str]) -> int:
  """Returns the process's exit status; see `cluster.exit_status`."""
  chosen = flags.FLAGS
  try:
    overrides, rest = command_line.split_overrides(argv)
    chosen(rest)
    place = cluster.find(
      chosen.coordinator, chosen.num_processes, chosen.process_id
    )
    config, workdir = command_line.from_flags(chosen, overrides, place.count)
  except (flags.Error, config_lib.ConfigError) as e:
    print(f'error: {e}'.replace('\n', ' '), file=sys.stderr)
    return 2

  xla_flags.enable_for(config)
  command = {f'--{k}': chosen[k].value for k in ('mode', 'checkpoint')}
  try:
    with cluster.start(config, place, command) as processes:
      # Heavy: only once the input is known to be good.
      from anp_jax import train

      how = chosen.mode, chosen.checkpoint, processes, chosen.output
      train.run(config, workdir, *how)
  except KeyboardInterrupt:
    print(f'\ninterrupted; the same command goes on in {workdir}')
    return 130
  except cluster.EXPECTED as e:
    code, text = cluster.exit_status(e)
    print(f'error: {text}', file=sys.stderr)
    return code
  return 0


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  status = main(sys.argv)
  if status == 1:
    # Of a failed save, pages of errors would follow while Python shuts down.
    print(end='', flush=True)
    os._exit(status)
  sys.exit(status)
