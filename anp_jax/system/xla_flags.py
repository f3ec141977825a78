"""Settings of XLA and the memory allocators, applied before JAX starts.

XLA reads XLA_FLAGS once, when the first device is opened, and ends the process
on an unknown flag. So each flag is one that jaxlib 0.10.2 and 0.12.0 know (a test
tries all of them on the installed jaxlib), and only a run on its platform gets it.
Settings of the user are never changed. docs/gpu.md says what was left out.
"""

from collections.abc import Callable, MutableMapping
import contextlib
import glob
import importlib.util
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from anp_jax.system import cores

if TYPE_CHECKING:
  import ml_collections


class Setting(NamedTuple):
  """A flag of XLA for a platform: 'cpu', 'gpu' or 'tpu'."""

  name: str
  value: str
  platform: str


FLAGS = (
  # YNNPACK computes products and sums: XLA's own long sums, such as the norms of gradients and
  # weights, take ten times as long. By default it computes convolutions too, and a ResNet-50's
  # step by XLA alone takes 1.1 times as long. Without INDIVIDUAL_DOT, JAX 0.12 widens bfloat16
  # products to float32, which takes twice as long.
  Setting(
    'xla_cpu_experimental_ynn_fusion_type',
    'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE',
    'cpu',
  ),
  # Gradient sums overlap the backward pass; Hopper and newer do it anyway.
  Setting('xla_gpu_enable_latency_hiding_scheduler', 'true', 'gpu'),
  # Gradients are joined already (parallel/buckets.py); joined once more, the last of
  # them, which nothing hides, would be 30 MB.
  Setting('xla_gpu_all_reduce_combine_threshold_bytes', '1048576', 'gpu'),
)

# For runs that are the same to the bit, see parallel/invariant: no algorithm that adds in
# the order of arrival, and none chosen by trying out, which may choose another next time.
DETERMINISTIC = (Setting('xla_gpu_deterministic_ops', 'true', 'gpu'),)

# For runs whose computing is a sleep, see models/emulated.py: gradients leave in buckets
# while the backward pass goes on, as on a GPU. Joined to one sum, as on a CPU, all would
# wait for its end.
EMULATED = (Setting('xla_disable_hlo_passes', 'cpu-all-reduce-combiner', 'cpu'),)

# The share of a GPU's memory, which training owns: 0.75, the default, leaves a quarter of
# it unused. JAX refuses to start with both names, the present one and that of before.
MEMORY = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'
_MEMORY_SHARE = '0.85'
_CUDA_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin')
_GOOGLE = '0x1ae0'  # vendor in PCI's list
_CUDA_SETUP = (
  'make setup ACCELERATOR=cuda13 (cuda12 below driver 580 or Turing), or '
  'pip install -r requirements-cuda.txt'
)
_TPU_SETUP = "make setup ACCELERATOR=tpu, or pip install 'jax[tpu]'"
_HUGE_PAGES = '/sys/kernel/mm/transparent_hugepage/enabled'
# How many threads XLA's CPU devices share, all of a process; by default as many
# as there are cores. XLA looks at the first of these names first.
_THREADS = 'PJRT_NPROC', 'NPROC'
# A callback that waits holds a thread, and would wait for ever once all do.
SPARE_THREADS = 8
_PLATFORMS = {'cuda': 'gpu', 'gpu': 'gpu', 'cpu': 'cpu', 'tpu': 'tpu'}


def enable(
  environment: MutableMapping[str, str] = os.environ,
  deterministic: bool = False,
  spare: int = 0,
  threads: int = 0,
  emulated: bool = False,
) -> None:
  """Applies the settings of this machine's platform; a second call does nothing.

  Nothing is set once JAX has opened its devices: it would be too late.

  Args:
    environment: environment variables, read and set.
    deterministic: whether the run must be the same to the bit.
    spare: threads of the pool that the CPU devices share beyond one per core, for
      programs that begin while others hold these.
    threads: size of the pool; 0: the cores and `spare`.
    emulated: whether computation is a sleep, which also holds a thread.
  """
  if _devices_are_open():
    return
  here = platform(environment)
  if here == 'gpu' and not any(name in environment for name in MEMORY):
    environment[MEMORY[0]] = _MEMORY_SHARE
  spare = spare or SPARE_THREADS * emulated
  if spare and not threads:
    threads = cores.count() + spare
  if threads and here == 'cpu' and not any(n in environment for n in _THREADS):
    environment[_THREADS[-1]] = str(threads)
  settings = FLAGS + DETERMINISTIC * deterministic + EMULATED * emulated
  flags = _missing_flags(settings, here, environment.get('XLA_FLAGS', ''))
  if flags:
    words = [*flags, environment.get('XLA_FLAGS', '')]
    environment['XLA_FLAGS'] = ' '.join(words).strip()


def enable_for(
  config: 'ml_collections.ConfigDict', environment: MutableMapping[str, str] = os.environ
) -> None:
  """Calls `enable` with the settings of a config and its strategy."""
  # Not before a restart: it imports what a config is made of.
  from anp_jax.config import emulation_keys, strategy as strategy_lib

  settings = strategy_lib.find(config).xla_settings(config)
  enable(environment, emulated=emulation_keys.sleeps(config), **settings)


def use_huge_pages(
  environment: MutableMapping[str, str] = os.environ, restart: Callable = os.execve
) -> None:
  """Restarts a process that computes on a CPU with large arrays on huge pages.

  A step allocates and frees its intermediate results: at 4 KB a page the kernel
  clears 200,000 pages a step of ResNet-50, an eighth of the time. The allocator
  reads its settings when a process starts and never again; the new process has
  the old one's number, files and arguments.

  Args:
    environment: environment variables, read and set.
    restart: function of (program, arguments, environment).
  """
  tunables = environment.get('GLIBC_TUNABLES', '')
  if 'glibc.malloc.hugetlb' in tunables or not _can_restart():
    return
  # [always]: there is nothing to do; [never]: nothing can be done.
  if platform(environment) != 'cpu' or '[madvise]' not in _read(_HUGE_PAGES):
    return
  settings = filter(None, [tunables, 'glibc.malloc.hugetlb=1'])
  environment['GLIBC_TUNABLES'] = ':'.join(settings)
  # A Ctrl-C that comes now waits for the new process; see `interrupts.install`.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  # Without it a step is slower, and no less right.
  with contextlib.suppress(OSError):
    restart(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
  signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _can_restart():
  """Whether the same arguments would start the same process again."""
  # A debugger would be lost.
  monitoring = getattr(sys, 'monitoring', None)
  if sys.gettrace() or (monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID)):
    return False
  # Not a script that another runs, and not one that came on standard input.
  named = sys.argv[0] in sys.orig_argv or '-m' in sys.orig_argv
  return bool(sys.executable and named and os.path.isfile(sys.argv[0]))


def platform(environment: MutableMapping[str, str] = os.environ) -> str:
  """Returns the platform on which JAX will compute, without importing it.

  Returns:
    'cpu', 'gpu' (NVIDIA's), 'tpu', or another name in JAX_PLATFORMS.
  """
  named = environment.get('JAX_PLATFORMS', '').split(',')[0].strip().lower()
  if named:
    return _PLATFORMS.get(named, named)
  # A build of JAX without a plugin computes on the CPU, whatever is plugged in.
  if _installed('libtpu') and _exists('/dev/accel[0-9]*', '/dev/vfio/[0-9]*'):
    return 'tpu'
  # The last two files: a container that hides /proc, and WSL.
  files = '/proc/driver/nvidia', '/dev/nvidiactl', '/dev/dxg'
  has_gpu = not _hides_gpus(environment) and _installed(*_CUDA_PLUGINS) and _exists(*files)
  return 'gpu' if has_gpu else 'cpu'


def cpu_threads(devices: int, environment: MutableMapping[str, str] = os.environ) -> int:
  """Returns the number of threads in the pool that XLA's CPU devices share.

  Args:
    devices: CPU devices of this process; the pool has a thread for each.
    environment: variables at the time when JAX opened the devices.
  """
  text = named_threads(environment)
  # XLA takes what is no number, or none, for a variable that is not set.
  named = int(text) if text.isdecimal() else 0
  return max(named or cores.count(), devices)


def named_threads(environment: MutableMapping[str, str] = os.environ) -> str:
  """Returns the text of the variable that sets the pool's size; '' without one."""
  return next((environment[n] for n in _THREADS if n in environment), '')


def nvidia_smi(*arguments: str) -> str:
  """Returns the output of nvidia-smi; '' where it is missing or fails."""
  try:
    return subprocess.run(
      ['nvidia-smi', *arguments], capture_output=True, text=True, timeout=30, check=True
    ).stdout
  except (OSError, subprocess.SubprocessError):
    return ''


def missing_plugin(environment: MutableMapping[str, str] = os.environ, root: str = '/') -> str:
  """Returns what to install where JAX cannot use this host's accelerator.

  JAX itself only warns, and computes on the CPU.

  Args:
    environment: variables; a variable that names the platform or hides the devices
      chooses the CPU.
    root: root of the file system.

  Returns:
    One line; '' where nothing is missing.
  """
  if environment.get('JAX_PLATFORMS', '').strip():
    return ''
  tpus = ('dev/accel[0-9]*', *['dev/vfio/[0-9]*'] * _is_tpu_host(environment, root))
  gpus = () if _hides_gpus(environment) else ('dev/nvidia[0-9]*', 'proc/driver/nvidia/gpus/*')
  for kind, plugins, patterns, install in (
    ('an NVIDIA GPU', _CUDA_PLUGINS, gpus, _CUDA_SETUP),
    ('a TPU', ('libtpu',), tpus, _TPU_SETUP),
  ):
    paths = sorted(path for p in patterns for path in glob.glob(os.path.join(root, p)))
    if paths and not _installed(*plugins):
      return (
        f'this host has {kind} ({paths[0]}), but JAX has no plugin for it: {install}; '
        'JAX_PLATFORMS=cpu to compute on the CPU'
      )
  return ''


def _is_tpu_host(environment, root):
  """Whether vfio, which is for any device of a virtual machine, is for a TPU."""
  vendors = glob.glob(os.path.join(root, 'sys/bus/pci/devices/*/vendor'))
  named = environment.get('TPU_ACCELERATOR_TYPE') or environment.get('TPU_NAME')
  return bool(named) or any(_read(path).strip() == _GOOGLE for path in vendors)


def _hides_gpus(environment):
  return environment.get('CUDA_VISIBLE_DEVICES', '0').strip() in ('', '-1')


def not_deterministic(
  platform: str, environment: MutableMapping[str, str] = os.environ
) -> list[str]:
  """Returns the flags that a bit-exact run needs and XLA_FLAGS does not have."""
  words = environment.get('XLA_FLAGS', '').split()
  flags = [f'--{s.name}={s.value}' for s in DETERMINISTIC if s.platform == platform]
  return [flag for flag in flags if flag not in words]


def _missing_flags(settings, platform, text):
  """The flags of a platform that the text of XLA_FLAGS does not name."""
  # Anything else is the path of a file with flags, which stands alone.
  if text.strip() and not text.lstrip().startswith('-'):
    return []
  named = {word.partition('=')[0].lstrip('-') for word in text.split()}
  return [
    f'--{s.name}={s.value}' for s in settings if s.platform == platform and s.name not in named
  ]


def _devices_are_open():
  # There is no public name for it; a JAX without this one is not asked.
  bridge = sys.modules.get('jax._src.xla_bridge')
  return bool(getattr(bridge, 'backends_are_initialized', bool)())


def _installed(*modules):
  return any(importlib.util.find_spec(name) for name in modules)


def _exists(*patterns):
  return any(glob.glob(pattern) for pattern in patterns)


def _read(path):
  try:
    with open(path) as f:
      return f.read()
  except OSError:
    return ''
