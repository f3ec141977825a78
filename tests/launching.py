"""Starts several processes of main.py on this machine."""

import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests import forking

ROOT = pathlib.Path(__file__).resolve().parents[1]

# A network whose result depends on no grouping, and whose step compiles fast.
TINY = {
  'log.tensorboard': 'False',
  'log.every': '1 steps',
  'model.name': 'tests.user_network:PlainNet',
  'model.norm_group': '4',
  'data.synthetic_examples': '70',  # 70 do not divide by any batch below
}

# Sums in another order differ by some 1e-14, in a process with the variables X64.
FLOAT64 = {
  'model.dtype': 'float64',
  'model.param_dtype': 'float64',
  'strategy.reduce_dtype': 'float64',
}
X64 = {'JAX_ENABLE_X64': '1'}
# The rate does not end with a part of a run: one that goes on has the same.
CONSTANT = {'schedule.name': 'constant', 'schedule.warmup': '0 steps'}

# Of such a run most is compiling: XLA leaves most optimizations out. That restart which
# gives a process huge pages would come after its first imports.
QUICK = {
  'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  'XLA_FLAGS': '--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1',
  'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
}


def command(
  *words, status=0, folder=ROOT, text='', timeout=300, **environment
) -> subprocess.CompletedProcess:
  """Runs a command to its end, with these variables and a text to read.

  Asserts that it ends with the status, where that is not None.
  """
  done = subprocess.run(
    [*map(str, words)],
    cwd=folder,
    env={**os.environ, **environment},
    input=text,
    capture_output=True,
    text=True,
    errors='replace',
    timeout=timeout,
  )
  assert status in (None, done.returncode), done.stdout + done.stderr
  return done


def python(*arguments, status=None, **options) -> subprocess.CompletedProcess:
  """Runs Python with these arguments as `command` does; it may end with any status."""
  return command(sys.executable, *arguments, status=status, **options)


class Program(subprocess.Popen):
  """A process with pipes of text, which ends with its context."""

  def hears(self, line) -> None:
    """Asserts that the next line that it prints is this one."""
    assert self.stdout.readline() == f'{line}\n'

  def __exit__(self, *error):
    self.kill()
    super().__exit__(*error)


def start(*arguments, folder=ROOT, **environment) -> Program:
  """Starts Python with these arguments and variables, and none of a Slurm job's.

  As a terminal does, it gives the process a group of its own.
  """
  inherited = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')}
  return Program(
    [sys.executable, *map(str, arguments)],
    cwd=folder,
    env={**inherited, 'PYTHONPATH': str(ROOT), **environment},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def wait_until(condition, seconds=100, text=lambda: '', pause=0.01) -> None:
  """Waits until a condition holds; fails with the text after some seconds."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, text()
    time.sleep(pause)


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def typed(keys) -> list[str]:
  """Returns keys of a config as a person types them."""
  return [f'--config.{key}={value}' for key, value in keys.items()]


def arguments(workdir, *more, **texts) -> list[str]:
  """Arguments of main.py: the tiny recipe, with these keys."""
  keys = {**TINY, **texts}
  if texts.get('data.source', 'synthetic') != 'synthetic':
    keys.pop('data.synthetic_examples')
  return ['--config=configs/resnet_anp.py:tiny', f'--workdir={workdir}', *typed(keys), *more]


class Ranks:
  """Processes of one run; their output goes to files, rank by rank."""

  def __init__(self, folder, count, main_arguments, devices=1, environment=None, last_arguments=()):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    devices = [devices] * count if isinstance(devices, int) else devices
    self.outputs = [folder / f'rank{i}.log' for i in range(count)]
    for output in self.outputs:
      output.unlink(missing_ok=True)
    self._flags = [f'--coordinator=127.0.0.1:{port}', f'--num_processes={count}', *main_arguments]
    self._devices = devices
    self._environment = environment or {}
    self._last_arguments = last_arguments  # of the last rank, after the others
    self._copies: dict[int, threading.Thread] = {}
    self.processes = [self._start(i) for i in range(count)]

  def restart(self, rank, joins=False):
    """Restarts a rank that has ended; it may join a run that goes on elsewhere."""
    self.processes[rank].wait()
    self.processes[rank] = self._start(rank, joins)

  def _start(self, rank, joins=False):
    more = self._last_arguments if rank == len(self.outputs) - 1 else ()
    flags = [f'--process_id={rank}', *self._flags, *more]
    if joins:
      flags = ['--join', *self._flags[2:], *more]
    self.outputs[rank].touch()
    command = ['tests/phased.py', 'main.py', *flags]
    environment = {
      **os.environ,
      **QUICK,
      'JAX_NUM_CPU_DEVICES': str(self._devices[rank]),
      **self._environment,
    }
    if 'ANP_STUCK' in environment:  # in an import
      process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
      )
    else:
      process = forking.Process(command, environment)
    copy = threading.Thread(target=_copy, args=(process.stdout, self.outputs[rank]), daemon=True)
    copy.start()
    self._copies[rank] = copy
    return process

  def wait(self, timeout=120) -> list[int]:
    """Exit status of each, once all that they wrote can be read."""
    return [self.wait_for(rank, timeout) for rank in range(len(self.processes))]

  def wait_for(self, rank, timeout=120) -> int:
    code = self.processes[rank].wait(timeout)
    self._copies[rank].join(timeout)
    return code

  def ends(self, *codes, timeout=120) -> list[str]:
    """Asserts that the ranks end with these statuses; returns what each wrote."""
    statuses, texts = self.wait(timeout), [path.read_text() for path in self.outputs]
    assert statuses == [*codes], '\n'.join(texts)
    return texts

  def text(self, rank=0) -> str:
    return self.outputs[rank].read_text()

  def end(self):
    for process in self.processes:
      process.kill()
      process.wait()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.end()


def _copy(pipe, output):
  with pipe, open(output, 'ab', buffering=0) as f:
    while data := os.read(pipe.fileno(), 2**16):
      f.write(data)


def dead_proxy() -> dict[str, str]:
  """Variables that name a proxy at which nobody listens."""
  names = 'http_proxy', 'https_proxy', 'grpc_proxy', 'all_proxy'
  address = f'http://127.0.0.1:{free_port()}'
  clean = dict.fromkeys(('no_proxy', 'no_grpc_proxy', 'NO_PROXY'), '')
  return {**dict.fromkeys((*names, *map(str.upper, names)), address), **clean}


def run(folder, count, main_arguments, devices=1, **more) -> list[str]:
  """Runs to a good end; returns what each rank wrote."""
  return ended(folder, [0] * count, main_arguments, devices, **more)


def ended(folder, codes, main_arguments, devices=1, timeout=120, **more) -> list[str]:
  """Runs a rank for each status, with which it ends; returns what each wrote."""
  with Ranks(folder, len(codes), main_arguments, devices, **more) as ranks:
    return ranks.ends(*codes, timeout=timeout)


def replayed(workdir) -> str:
  """Replays a run of parameter servers, which must have the same bits; returns the output."""
  words = '-m', 'anp_jax.tools.trials.replay', 'server.jsonl', '--trust'
  environment = {'PYTHONPATH': str(ROOT), **QUICK}
  return python(*words, status=0, folder=workdir, **environment).stdout


def weights(workdir) -> dict[str, np.ndarray]:
  """Returns every leaf of the newest checkpoint, read by Orbax alone."""
  folders = _numbered(pathlib.Path(workdir) / 'checkpoints')
  return _leaves(max(folders, key=lambda p: int(p.name)))


def best_weights(workdir) -> dict[str, np.ndarray]:
  """Returns every leaf of the best checkpoints, likewise."""
  parts = map(_leaves, _numbered(pathlib.Path(workdir) / 'best'))
  return {name: leaf for leaves in parts for name, leaf in leaves.items()}


def _numbered(folder):
  return [path for path in folder.iterdir() if path.name.isdigit()]


def _leaves(checkpoint):
  reader = ocp.PyTreeCheckpointer()
  saved = reader.metadata(checkpoint / 'state').item_metadata.tree
  # As NumPy arrays: the devices that wrote them are not here.
  kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
  tree = reader.restore(checkpoint / 'state', restore_args=kinds)['state']
  return {
    f'{checkpoint.name}/{jax.tree_util.keystr(path, simple=True, separator="/")}': leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
