"""What every test shares: eight simulated devices and a tiny config."""

import gc
import os
import pathlib
import signal

_ROOT = pathlib.Path(__file__).resolve().parent.parent

# Most of what is imported or traced stays, and each collection passes through JAX's
# caches, too: a fifth of the time of a test of layers.
gc.set_threshold(50_000)

# A shell's `&` has its programs ignore SIGINT, and so would the processes to
# which tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# Before jax is imported by any test. Child processes inherit them too, except
# that a command as a person types it sees one device.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_ROOT / '.pytest_cache' / 'xla'))

import jax  # noqa: E402
from jax._src import compiler  # noqa: E402
import pytest  # noqa: E402
from xdist import scheduler  # noqa: E402

from anp_jax.config import trust  # noqa: E402
from anp_jax.reporting.run_page import curves  # noqa: E402
from tests import builders, gcs_server  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)

_BLANK = builders.encode_image(builders.random_pixels(1, 1))

# Begun last, they would leave all other processes idle.
_LONGEST = ('test_shipped_demo_learns', 'test_killed_again_and_again_ends_with_the_same_bits')


def pytest_collection_modifyitems(items):
  """Slurm's tests come first, then the longest; all others keep their order."""
  items.sort(key=lambda item: ('slurm' not in item.path.name, item.name not in _LONGEST))


class _OneCluster(scheduler.LoadScopeScheduling):
  """The tests of a file are of one process, and those of all of Slurm's files.

  The latter mostly wait for the one cluster that there is, so others go on at the
  same time.
  """

  def _split_scope(self, nodeid):
    path = nodeid.split('::')[0]
    return 'slurm' if 'slurm' in path else path


@pytest.hookimpl(optionalhook=True)  # With -p no:xdist nobody calls it.
def pytest_xdist_make_scheduler(config, log):
  """Returns what divides tests under --dist=loadscope; None: as usual."""
  if config.getvalue('dist') == 'loadscope':
    return _OneCluster(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
  """Modules and tests stay: no collection has to look at them."""
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='session')
def gcs():
  """A stand-in for Google Cloud Storage that this process's clients find."""
  # Clients look it up once, so there is one for all tests.
  with gcs_server.Server() as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.environment.items():
      patch.setenv(name, value)
    pytest.importorskip('gcsfs', reason="needs gcsfs: pip install '.[gs]'")
    yield server


@pytest.fixture
def config():
  """The tiny recipe, a fresh copy for each test."""
  return builders.tiny_recipe()


@pytest.fixture
def tiny_config(config):
  """The tiny recipe on a network that compiles in a moment."""
  return builders.on_small_network(config)


@pytest.fixture
def on_one_device(monkeypatch):
  """Eight simulated devices are for the tests that name them."""
  builders.use_devices(monkeypatch, 1)


@pytest.fixture
def quick_collections():
  """A test's own collections look at nothing that there was before it, a second each."""
  gc.freeze()


@pytest.fixture
def x64():
  """Arrays may be of float64."""
  with jax.enable_x64(True):
    yield


@pytest.fixture(autouse=True)
def _names_from_files():
  """A name that a test reads from a file is not refused in the next one."""
  before = set(trust._read)
  yield
  trust._read.intersection_update(before)


@pytest.fixture(scope='module', autouse=True)
def quick_compiles():
  """XLA leaves most optimizations out, and reports have a blank figure of curves.

  These take most of a tiny run's time. A module that tests them defines a fixture of
  this name that does nothing.
  """
  before = jax.config.values['jax_disable_most_optimizations']
  jax.config.update('jax_disable_most_optimizations', True)
  real = compiler.get_compile_options

  def quick_options(*args, **kwargs):
    options = real(*args, **kwargs)
    # Fusions that go through MLIR are four fifths of what is left, and to compile a
    # module in parts, for several threads, half of the rest.
    options.env_option_overrides += [
      ('xla_cpu_use_fusion_emitters', False),
      ('xla_cpu_parallel_codegen_split_count', 1),
    ]
    return options

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compiler, 'get_compile_options', quick_options)
    patch.setattr(curves, 'plot', lambda path, *_: pathlib.Path(path).write_bytes(_BLANK))
    yield
  jax.config.update('jax_disable_most_optimizations', before)
