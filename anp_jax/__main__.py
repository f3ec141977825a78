"""Trains or evaluates an image classifier.

python main.py --config=configs/resnet_anp.py:demo --workdir=runs/demo
python main.py --workdir=runs/demo --mode=evaluate
srun python main.py ...    # or mpirun, or see docs/clusters.md
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.train()

import contextlib
import gc
import importlib
import os
import sys
import threading

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import generation, joining, workdir_lock
from anp_jax.config import command_line, exits, strategy as strategy_lib, urls
from anp_jax.system import compute_dtype, interrupts, mirror, xla_flags

_EVALUATION = """Evaluates an image classifier.

anp-evaluate --workdir=runs/demo
anp-evaluate --workdir=runs/demo --checkpoint=best
"""


def main(argv: list[str], mode: str = '') -> int:
  """Trains or evaluates.

  Args:
    argv: command line.
    mode: 'evaluate' for a command without --mode; '': the mode of --mode.

  Returns:
    The process's exit status; see `cluster.exit_status`.
  """
  try:
    overrides, rest = command_line.split_overrides(argv[1:])
    description = _EVALUATION if mode else __doc__
    flags = command_line.main_flags(rest, description, mode)
    if flags.workdir:
      flags.workdir = mirror.fetch(flags.workdir)
    launched = place = cluster.detect(flags.coordinator, flags.num_processes, flags.process_id)
    if flags.join:
      place = joining.newcomer(flags.workdir, launched)
    config, workdir = command_line.from_flags(flags, overrides, place.count)
  except config_lib.ConfigError as e:
    print(exits.error_line(e), file=sys.stderr)
    return 2

  interrupts.set_line('interrupted; run the same command to resume in ' + urls.remote_url(workdir))
  xla_flags.enable_for(config)
  names = 'mode', 'checkpoint', 'change'
  command = {f'--{name}': getattr(flags, name) for name in names}
  try:
    config = compute_dtype.decide(config, workdir)
    if generation.current().number:  # while it looks for the others; its environment is final
      threading.Thread(target=importlib.import_module, args=['anp_jax.train']).start()
    with contextlib.ExitStack() as stack:
      processes = stack.enter_context(cluster.start(config, place, command, workdir))
      if flags.mode == 'train':
        # One that was stopped finds itself replaced, and joins the run again.
        grace = 60.0 if processes.is_elastic else 0.0
        lock = workdir_lock.held(workdir, processes.env, processes.generation, grace)
        stack.enter_context(lock)
        if not processes.index:
          coordinator = processes.env.coordinator_address
          joining.write(workdir, processes.generation.addresses, coordinator)
      # Slow imports: only after the input is checked.
      from anp_jax import train
      from anp_jax.checkpoint import run_dir

      if not gc.isenabled():  # see `command`
        gc.freeze()
        gc.enable()
      if flags.change:
        stack.enter_context(run_dir.change(workdir, config, flags.change, processes))
      if flags.mode in strategy_lib.TRIALS:
        from anp_jax.tools import trials

        trials.run(config, workdir, flags.mode, processes)
      else:
        fields = 'mode', 'checkpoint', 'output', 'sentiment', 'emotions'
        chosen = {name: getattr(flags, name) for name in fields}
        train.start(strategy_lib.Invocation(config, workdir, processes, **chosen))
    if processes.interrupted:
      return interrupts.STATUS
    is_stopped = os.path.exists(os.path.join(workdir, run_dir.MARKER))
    if flags.mode == 'train' and place.count > 1 and not processes.index and not is_stopped:
      with train.uploading(workdir):
        joining.write(workdir, {}, ended=launched.coordinator_address)
  except cluster.EXPECTED as e:
    code, text = cluster.exit_status(e)
    print(urls.remote_url(f'error: {text}'), file=sys.stderr)
    return code
  return 0


def command(mode: str = '') -> None:
  """Runs as a program: python main.py, python -m anp_jax, anp-train."""
  interrupts.listen()
  # Until all is imported: passes over the modules, which stay, took 0.7 s.
  gc.disable()
  status = main(sys.argv, mode)
  if status == 1:
    # After a failed save, Python's shutdown would print pages of errors.
    print(end='', flush=True)
    mirror.remove()
    os._exit(status)
  interrupts.exit(status)
