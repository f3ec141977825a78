"""What a start does without, since nothing before the first step needs it, and meanwhile."""

import json

import pytest

from anp_jax.cluster import generation
from tests import launching

_PROGRAM = """
import os
import sys

from anp_jax import __main__ as command, run
from anp_jax.parallel import state

def report_startup(self):
  print(*{name.partition('.')[0] for name in sys.modules}, flush=True)
  os._exit(0)

def variables(*arguments):
  print('traced', flush=True)
  return real(*arguments)

real, state.variables = state.variables, variables
run.Run.report_startup = report_startup
command.main(sys.argv)
"""


def test_before_its_first_step_a_run_imports_little_and_traces_its_state_once(tmp_path):
  recipe = '--config=configs/resnet_anp.py:tiny'
  flags = '--config.model.name=tests.user_network:SmallNet', f'--workdir={tmp_path}/run'
  done = launching.python('-c', _PROGRAM, recipe, *flags, status=0, **launching.QUICK)
  *lines, modules = done.stdout.splitlines()
  assert lines.count('traced') == 1
  assert {'jax', 'orbax'} <= set(modules.split())
  slow = 'jinja2 keras matplotlib pandas pyarrow scipy tensorboardX tensorflow torch'
  assert not set(slow.split()) & set(modules.split())


_MEETING = """
import sys
import time

from anp_jax import __main__ as command, cluster

def start(*arguments):
  end = time.monotonic() + float(sys.argv[1])
  while not hasattr(sys.modules.get('anp_jax.train'), 'start') and time.monotonic() < end:
    time.sleep(0.01)
  print('jax' in sys.modules, time.monotonic() < end)
  sys.exit()

cluster.start = start
command.main(sys.argv[1:])
"""


@pytest.mark.parametrize('number, seconds, words', [(0, 0.1, 'False False'), (1, 60, 'True True')])
def test_a_process_that_restarts_imports_while_the_others_meet(tmp_path, number, seconds, words):
  """The first start is one of a process alone, which waits for nobody."""
  inherited = json.dumps(generation.FIRST._replace(number=number)._asdict())
  flags = '--config=configs/resnet_anp.py:tiny', f'--workdir={tmp_path}/run'
  variables = {**launching.QUICK, generation.VARIABLE: inherited}
  done = launching.python('-c', _MEETING, seconds, *flags, status=0, **variables)
  assert done.stdout == f'{words}\n'
