"""What the user has set stands, and XLA takes every flag."""

import os
import sys
import tomllib

import pytest

from anp_jax import config as config_lib
from anp_jax.system import xla_flags
from tests import builders, launching

_LATENCY = 'xla_gpu_enable_latency_hiding_scheduler'
_COMBINE = '--xla_gpu_all_reduce_combine_threshold_bytes=1048576'
_LIBRARY = 'xla_cpu_experimental_ynn_fusion_type'
_GPU = {'JAX_PLATFORMS': 'cuda'}


@pytest.fixture(autouse=True)
def before_jax_starts(monkeypatch):
  """The state in which main.py starts; this process has devices already."""
  monkeypatch.setattr(xla_flags, '_devices_are_open', lambda: False)
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  for name in [name for name in os.environ if name.startswith('XLA')]:
    monkeypatch.delenv(name)


@pytest.fixture
def host_has(monkeypatch):
  """Says which packages are installed and which files exist."""

  def pretend(*names):
    monkeypatch.setattr(xla_flags, '_installed', lambda *m: set(m) & set(names))
    monkeypatch.setattr(xla_flags, '_exists', lambda *p: set(p) & set(names))

  return pretend


def test_a_gpu_gets_its_settings_and_a_second_call_adds_nothing():
  environment = dict(_GPU)
  xla_flags.enable(environment)
  assert environment == {
    'JAX_PLATFORMS': 'cuda',
    'XLA_FLAGS': f'--{_LATENCY}=true {_COMBINE}',
    'XLA_CLIENT_MEM_FRACTION': '0.85',
  }
  before = dict(environment)
  xla_flags.enable(environment)
  assert environment == before


@pytest.mark.parametrize('name', ['cpu', 'rocm', 'cpu,cuda'])
def test_no_other_platform_gets_what_is_for_gpus(name):
  environment = {'JAX_PLATFORMS': name}
  xla_flags.enable(environment)
  assert _LATENCY not in environment.get('XLA_FLAGS', '')
  assert 'XLA_CLIENT_MEM_FRACTION' not in environment


def test_a_cpu_gets_its_flag():
  environment = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_dump_to=/x'}
  flag = f'--{_LIBRARY}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE'
  xla_flags.enable(environment)
  assert environment['XLA_FLAGS'] == f'{flag} --xla_dump_to=/x'
  user_flags = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': f'--{_LIBRARY}='}
  before = dict(user_flags)
  xla_flags.enable(user_flags)
  assert user_flags == before


@pytest.mark.parametrize(
  'environment, devices, threads',
  [
    ({}, 1, 3),
    ({}, 5, 5),
    ({'NPROC': '2'}, 1, 2),
    ({'NPROC': '2'}, 4, 4),
    ({'NPROC': '2', 'PJRT_NPROC': '7'}, 1, 7),
    ({'NPROC': 'many'}, 1, 3),
  ],
)
def test_threads_are_those_named_or_the_cores_and_one_a_device(
  monkeypatch, environment, devices, threads
):
  monkeypatch.setattr(xla_flags.cores, 'count', lambda: 3)
  assert xla_flags.cpu_threads(devices, environment) == threads


def test_a_run_that_promises_bits_gets_its_threads(config):
  config.strategy.threads = 6
  environment = {'JAX_PLATFORMS': 'cpu'}
  xla_flags.enable_for(config, environment)
  assert 'NPROC' not in environment
  config.strategy.name = 'invariant'
  xla_flags.enable_for(config, environment)
  assert environment['NPROC'] == '6'
  for name in ('NPROC', 'PJRT_NPROC'):
    user_flags = {'JAX_PLATFORMS': 'cpu', name: '9'}
    xla_flags.enable_for(config, user_flags)
    assert {k: user_flags.get(k) for k in ('NPROC', 'PJRT_NPROC')} == {
      'NPROC': None,
      'PJRT_NPROC': None,
      name: '9',
    }


@pytest.mark.parametrize(
  'user_flags, added',
  [
    # A flag that the user names stays.
    (f'--{_LATENCY}=false', _COMBINE),
    (f'--{_LATENCY}', _COMBINE),
    (f'--xla_a=1 --{_LATENCY}=0', _COMBINE),
    # Others come last: XLA takes the last of two values. Only the whole name counts.
    (f'--{_LATENCY}_or_so=1 --xla_dump_to=/x', f'--{_LATENCY}=true {_COMBINE}'),
    # XLA reads flags from a file if the text does not begin with a dash.
    ('/home/me/flags.txt', ''),
  ],
)
def test_flags_of_the_user_stand(user_flags, added):
  environment = {**_GPU, 'XLA_FLAGS': user_flags}
  xla_flags.enable(environment)
  assert environment['XLA_FLAGS'] == f'{added} {user_flags}'.strip()


@pytest.mark.parametrize('name', ['XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'])
def test_the_users_share_of_memory_stands(name):
  # JAX refuses to start with both names.
  environment = {**_GPU, name: '0.5'}
  xla_flags.enable(environment)
  assert {k: v for k, v in environment.items() if 'MEM' in k} == {name: '0.5'}


@pytest.mark.parametrize(
  'names, variables, platform',
  [
    ([], {}, 'cpu'),
    (['jax_cuda13_plugin', '/proc/driver/nvidia'], {}, 'gpu'),
    (['jax_cuda12_plugin', '/dev/dxg'], {}, 'gpu'),
    # A CPU build where a card is; a login node without one; a hidden card.
    (['/proc/driver/nvidia'], {}, 'cpu'),
    (['jax_cuda13_plugin'], {}, 'cpu'),
    (['jax_cuda13_plugin', '/proc/driver/nvidia'], {'CUDA_VISIBLE_DEVICES': ''}, 'cpu'),
    (['jax_cuda13_plugin', '/proc/driver/nvidia'], {'CUDA_VISIBLE_DEVICES': '1'}, 'gpu'),
    (['jax_cuda13_plugin', '/proc/driver/nvidia'], {'JAX_PLATFORMS': 'cpu'}, 'cpu'),
    ([], {'JAX_PLATFORMS': 'cuda,cpu'}, 'gpu'),
    (['libtpu', '/dev/vfio/[0-9]*'], {}, 'tpu'),
    (['libtpu'], {}, 'cpu'),
  ],
)
def test_platform(host_has, names, variables, platform):
  host_has(*names)
  assert xla_flags.platform(variables) == platform


_PCI = 'sys/bus/pci/devices/0000:01:00.0/'
_GPU_SETUP = 'make setup ACCELERATOR=cuda13'
_TPU_SETUP = 'make setup ACCELERATOR=tpu'


@pytest.mark.parametrize(
  'files, variables, plugins, words',
  [
    ({'dev/nvidia0': ''}, {}, (), ['dev/nvidia0', _GPU_SETUP]),
    (
      {'proc/driver/nvidia/gpus/0000:01:00.0/information': ''},
      {},
      (),
      ['/gpus/0000:01:00.0', _GPU_SETUP],
    ),
    # Another plugin does not serve it.
    ({'dev/nvidia0': ''}, {'CUDA_VISIBLE_DEVICES': '1'}, ('libtpu',), ['requirements-cuda.txt']),
    ({'dev/accel0': ''}, {}, (), ['dev/accel0', _TPU_SETUP]),
    ({'dev/vfio/0': ''}, {'TPU_NAME': 'x'}, (), ['dev/vfio/0', _TPU_SETUP]),
    ({'dev/vfio/0': '', _PCI + 'vendor': '0x1ae0\n'}, {}, ('jax_cuda13_plugin',), [_TPU_SETUP]),
    # Served, hidden, or not meant.
    ({'dev/nvidia0': ''}, {}, ('jax_cuda12_plugin',), []),
    ({'dev/accel0': ''}, {}, ('libtpu',), []),
    ({'dev/nvidia0': '', 'dev/accel0': ''}, {'JAX_PLATFORMS': 'cpu'}, (), []),
    ({'dev/nvidia0': ''}, {'CUDA_VISIBLE_DEVICES': '-1'}, (), []),
    # None of the two makers': a bare host, a card without a driver, a device
    # passed to a virtual machine, an NPU's folder.
    ({_PCI + 'vendor': '0x10de\n'}, {}, (), []),
    ({'dev/vfio/0': '', _PCI + 'vendor': '0x8086\n'}, {}, (), []),
    ({'dev/accel/accel0': '', 'dev/vfio/vfio': '', 'dev/nvidiactl': ''}, {}, (), []),
  ],
)
def test_an_accelerator_that_jax_has_no_plugin_for(
  files, variables, plugins, words, host_has, tmp_path
):
  host_has(*plugins)
  text = xla_flags.missing_plugin(variables, str(builders.write_tree(tmp_path, files)))
  assert bool(text) == bool(words) and '\n' not in text
  for word in words:
    assert word in text
  if words:
    assert text.endswith('JAX_PLATFORMS=cpu to compute on the CPU')


def test_what_the_line_says_to_install_is_what_set_up_installs():
  project = tomllib.loads((launching.ROOT / 'pyproject.toml').read_text())['project']
  lines = (launching.ROOT / 'requirements-cuda.txt').read_text().splitlines()
  assert [x for x in lines if not x.startswith('#')] == [
    '-r requirements.txt',
    *project['optional-dependencies']['cuda'],
  ]


@pytest.mark.parametrize(
  'huge_pages, variables, tunables',
  [
    ('always [madvise] never', {}, 'glibc.malloc.hugetlb=1'),
    (
      'always [madvise] never',
      {'GLIBC_TUNABLES': 'glibc.rtld.nns=4'},
      'glibc.rtld.nns=4:glibc.malloc.hugetlb=1',
    ),
    # Where it would not help.
    ('[always] madvise never', {}, ''),
    ('always madvise [never]', {}, ''),
    ('', {}, ''),  # no such file
    ('always [madvise] never', {'JAX_PLATFORMS': 'cuda'}, ''),
    ('always [madvise] never', {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0'}, ''),
  ],
)
def test_a_cpu_process_restarts_once_with_huge_pages(monkeypatch, huge_pages, variables, tunables):
  monkeypatch.setattr(xla_flags, '_read', lambda path: huge_pages)
  monkeypatch.setattr(xla_flags, '_can_restart', lambda: True)
  environment = {'JAX_PLATFORMS': 'cpu', **variables}
  before, restarts = dict(environment), []
  for _ in range(2):  # in the new process there is nothing left to do
    xla_flags.use_huge_pages(environment, lambda *a: restarts.append(a))
  if tunables:
    command = [sys.executable, *sys.orig_argv[1:]]
    assert restarts == [(sys.executable, command, before | {'GLIBC_TUNABLES': tunables})]
  else:
    assert not restarts and environment == before


_RESTART = """
import os
import sys
sys.path.insert(0, {root!r})
from anp_jax.system import xla_flags
xla_flags._read = lambda path: 'always [madvise] never'
print(os.getpid(), 'starts', sys.argv[1:], flush=True)
if {trace}:
  sys.settrace(lambda *a: None)
xla_flags.use_huge_pages()
print(os.getpid(), os.environ.get('GLIBC_TUNABLES'), sys.stdin.read())
"""


def _starts(tmp_path, *command, trace=False, text=''):
  program = tmp_path / 'program.py'
  program.write_text(_RESTART.format(root=str(launching.ROOT), trace=trace))
  done = launching.python(*command, folder=tmp_path, text=text, status=0)
  return done.stdout.splitlines()


@pytest.mark.parametrize('command', [['program.py'], ['-m', 'program']])
def test_the_new_process_is_the_old_one_over_again(tmp_path, command):
  first, second, last = _starts(tmp_path, *command, 'a b', '--c', text='piped')
  assert first == second  # the same number, the same arguments
  number = first.split()[0]
  assert first == f"{number} starts ['a b', '--c']"
  assert last == f'{number} glibc.malloc.hugetlb=1 piped'


def test_what_would_not_do_the_same_again_goes_on_as_it_is(tmp_path):
  # A debugger's process; a script that another one runs.
  first, last = _starts(tmp_path, 'program.py', trace=True)
  assert last.split()[1] == 'None'
  inside = "import runpy; runpy.run_path('program.py', run_name='__main__')"
  (tmp_path / 'driver.py').write_text(inside)
  first, last = _starts(tmp_path, 'driver.py')
  assert last.split()[1] == 'None'


_COMPUTE = """
import jax
print(jax.jit(lambda x: x @ x)(jax.numpy.ones((2, 2))).sum())
"""


def test_xla_takes_every_flag_of_every_platform():
  """XLA ends a process at a flag it does not know: a jaxlib may lose one."""
  settings = xla_flags.FLAGS + xla_flags.EMULATED
  flags = ' '.join(f'--{s.name}={s.value}' for s in settings)
  done = launching.python('-c', _COMPUTE, status=0, XLA_FLAGS=flags)
  assert done.stdout.strip() == '8.0'
  # And it would be seen.
  assert launching.python('-c', _COMPUTE, XLA_FLAGS=flags + ' --xla_no_flag=1').returncode != 0


def test_what_is_set_before_devices_are_open_reaches_xla(tmp_path):
  """Set by a process for itself, after jax was imported but not used."""
  launching.python(
    '-c',
    f"""
import os
import sys
from anp_jax.system import xla_flags
assert not set(sys.modules) & {{'jax', 'numpy', 'absl'}}
os.environ['XLA_FLAGS'] = '--xla_dump_to={tmp_path}'
import jax
os.environ['JAX_PLATFORMS'] = 'cuda'  # read again by nobody but us
xla_flags.enable()
{_COMPUTE}
# Now it is too late.
del os.environ['XLA_FLAGS'], os.environ['XLA_CLIENT_MEM_FRACTION']
xla_flags.enable()
assert not {{'XLA_FLAGS', 'XLA_CLIENT_MEM_FRACTION'}} & {{*os.environ}}
""",
    status=0,
  )
  # XLA writes down the options that differ from its own.
  texts = [p.read_text() for p in tmp_path.glob('*.debug_options')]
  assert texts and all(f'{_LATENCY}: true' in text for text in texts)


def test_a_run_that_promises_bits_gets_more():
  flag = '--xla_gpu_deterministic_ops=true'
  environment = dict(_GPU)
  assert xla_flags.not_deterministic('gpu', environment) == [flag]
  xla_flags.enable(environment, deterministic=True)
  assert flag in environment['XLA_FLAGS'].split()
  assert xla_flags.not_deterministic('gpu', environment) == []
  # The user's word stands, and is then refused by the strategy.
  user_flags = {**_GPU, 'XLA_FLAGS': '--xla_gpu_deterministic_ops=false'}
  xla_flags.enable(user_flags, deterministic=True)
  assert xla_flags.not_deterministic('gpu', user_flags) == [flag]
  assert xla_flags.not_deterministic('cpu', {}) == []


def test_emulated_computing_has_spare_threads_and_buckets_of_their_own(config, monkeypatch):
  """A sleep holds a thread, which a sum of gradients must not wait for."""
  monkeypatch.setattr(xla_flags.cores, 'count', lambda: 2)
  config = config_lib.replaced(config, {'emulate.enabled': True})
  environment = {'JAX_PLATFORMS': 'cpu'}
  xla_flags.enable_for(config, environment)
  assert environment['NPROC'] == '10'
  flags = environment['XLA_FLAGS'].split()
  assert '--xla_disable_hlo_passes=cpu-all-reduce-combiner' in flags
  gpu = dict(_GPU)
  xla_flags.enable_for(config, gpu)
  assert 'disable_hlo' not in gpu['XLA_FLAGS'] and 'NPROC' not in gpu
