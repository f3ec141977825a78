"""What a start does without, since nothing before the first step needs it."""

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
