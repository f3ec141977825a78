"""Files of tests can be read where what they compare with is absent."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_COLLECT = """
import sys

class Absent:
  def find_spec(self, name, *_):
    if name.partition('.')[0] in ('torch', 'transformers', 'timm', 'keras'):
      raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Absent())
import pytest
arguments = ['--collect-only', '-q', '-p', 'no:cacheprovider', 'tests']
sys.exit(pytest.main(arguments))
"""


@pytest.mark.slow
def test_tests_are_collected_without_peers():
  done = subprocess.run(
    [sys.executable, '-c', _COLLECT], cwd=_ROOT, capture_output=True, text=True, timeout=240
  )
  assert done.returncode == 0, done.stdout[-3000:]
