"""Tests of profiling: which steps a trace holds, read by JAX's own reader."""

import collections

import jax
import pytest

from anp_jax import train
from anp_jax.config import command_line
from anp_jax.system import profiling
from tests import builders

# jaxlib's own reader of statistics, on Python 3.12.
pytestmark = pytest.mark.filterwarnings('ignore:builtin type .* __module__')


def _traces(workdir):
  # Where TensorBoard looks: plugins/profile/DATE/HOST.xplane.pb.
  return sorted(workdir.glob('profile/plugins/profile/*/*.xplane.pb'))


def _events(path):
  """(name, statistics) of every event of a trace."""
  data = jax.profiler.ProfileData.from_file(str(path))
  for plane in data.planes:
    for line in plane.lines:
      for event in line.events:
        yield event.name, dict(event.stats)


def _recorded(workdir):
  """The numbers of the steps that are marked in the only trace."""
  (path,) = _traces(workdir)
  return sorted(s['step_num'] for name, s in _events(path) if name == 'train')


def _executed(path):
  """For each execution of the train step: how often each operation ran."""
  runs = collections.defaultdict(collections.Counter)
  for name, statistics in _events(path):
    if statistics.get('hlo_module') == 'jit_train_step':
      runs[statistics['run_id']][name] += 1
  return list(runs.values())


def _lines(capsys):
  out = capsys.readouterr().out
  return [x for x in out.splitlines() if x.startswith('profile')]


@pytest.mark.slow
@pytest.mark.usefixtures('on_one_device')
def test_exactly_the_steps_that_were_asked_for(tmp_path, tiny_config, capsys):
  tiny_config.batch_size = 256  # some 50 ms a step: long enough to be cut in two
  tiny_config.profile.steps = '3:7'  # of twelve
  with jax.transfer_guard('disallow'):
    train.run(tiny_config, str(tmp_path))
  assert _recorded(tmp_path) == [3, 4, 5, 6]
  # On the device: nothing of step 2 or 7, and step 6 to its last operation.
  first, *later = _executed(_traces(tmp_path)[0])
  assert len(first) > 10
  assert later == [first] * 3
  (line,) = _lines(capsys)
  assert 'steps 3 to 6' in line
  assert f'xprof --logdir={tmp_path}/profile' in line


def _profile(config, folder, text, done=0, total=6, bound=0):
  """Makes steps done + 1 to total under a profile of a run to `bound`; returns its lines."""
  config.profile.steps = text
  lines = []
  profile = profiling.Profile(config, str(folder), done, bound or total, lines.append)
  x = jax.numpy.ones(4)
  for number in range(done + 1, total + 1):
    with profile.step(number, x):
      x = jax.numpy.sin(x)
    profile.end(number, x)
  profile.close()
  return lines


@pytest.mark.parametrize(
  'run, recorded, words',
  [
    (('1:13', 0, 12), range(1, 13), ['steps 1 to 12 in']),
    (('8:10', 6, 12), [8, 9], ['steps 8 to 9 in']),  # of a resumed run
    (('12:20', 0, 12), [12], ['of step 12:', 'steps 12 to 19']),
    (('13:20', 0, 12), [], ['of no step:', 'steps 13 to 19', 'steps 1 to 12']),
    (('8:10', 12, 14), [], ['no step', 'steps 8 to 9', 'steps 13 to 14']),
  ],
)
def test_steps_that_a_run_has(run, recorded, words, tmp_path, config, monkeypatch):
  waits = []
  monkeypatch.setattr(jax, 'block_until_ready', waits.append)
  line = _profile(config, tmp_path, *run)[0]
  assert all(word in line for word in words), line
  assert (_recorded(tmp_path) if _traces(tmp_path) else []) == list(recorded)
  # The host waits before the first of them and after the last.
  assert len(waits) == (2 if recorded else 0)


def test_a_run_that_ends_inside_closes_the_trace(tmp_path, config):
  assert 'steps 3 to 4 in' in _profile(config, tmp_path, '3:9', 0, 4, bound=9)[0]
  assert _recorded(tmp_path) == [3, 4]


def test_a_run_continues_where_no_trace_can_be_taken(tmp_path, config):
  jax.profiler.start_trace(str(tmp_path / 'other'))
  try:
    (line,) = _profile(config, tmp_path, '3:5')
  finally:
    jax.profiler.stop_trace()
  assert 'failed, the run continues: Profile has already been started' in line


def test_one_process_of_many_records(tmp_path, config):
  config.profile.steps = '1:3'
  lines = []
  profile = profiling.Profile(config, str(tmp_path), 0, 10, lines.append, primary=False)
  for number in (1, 2, 3):
    with profile.step(number, ()):
      pass
    profile.end(number, ())
  profile.close()
  assert not lines and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
  'text', ['10', '10:10', '0:5', ':5', '1:2:3', ' 1:3', '1:9' + '9' * 5000, '٣:٧']
)
def test_bad_text_is_one_clear_line(text):
  line = builders.refusal(command_line.load, 'configs/resnet_anp.py:tiny', {'profile.steps': text})
  assert f'config.profile.steps={text!r}' in line
  assert "first:last, such as '10:15' for 10 to 14, from 1 on" in line
