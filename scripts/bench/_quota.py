"""Processes that get a part of a core, by a cgroup of Linux."""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib
import tempfile
import time

_ROOT = pathlib.Path('/sys/fs/cgroup')
_MEMBERS = 'cgroup.procs'
_PERIOD = 10_000  # microseconds


@contextlib.contextmanager
def limited(percent: int) -> Iterator[Sequence[str]]:
  """Has commands get a part of a core together.

  Args:
    percent: part of a core.

  Yields:
    The beginning of a command line, before the command that runs in the group.
  """
  with group(percent) as members:
    yield 'sh', '-c', f'echo $$ >{members} && exec "$@"', 'sh'


@contextlib.contextmanager
def group(percent: int) -> Iterator[pathlib.Path]:
  """Makes a group of processes that get a part of a core together.

  Args:
    percent: part of a core.

  Yields:
    The file to which the number of a process is written that is to be in the group.
  """
  quota = _PERIOD * percent // 100
  try:
    folder = pathlib.Path(tempfile.mkdtemp(prefix='anp_jax_', dir=outside().parent))
    members = folder / _MEMBERS
    if (folder / 'cpu.cfs_period_us').exists():  # the first version of cgroups
      (folder / 'cpu.cfs_period_us').write_text(str(_PERIOD))
      (folder / 'cpu.cfs_quota_us').write_text(str(quota))
    else:
      (folder / 'cpu.max').write_text(f'{quota} {_PERIOD}')
  except OSError as e:
    raise SystemExit(f'error: --quotas: a cgroup is expected at {_ROOT}, as root: {e}') from None
  try:
    yield members
  finally:
    while members.read_text():  # its processes are about to end
      time.sleep(0.1)
    folder.rmdir()


def outside() -> pathlib.Path:
  """Returns the file to which the number of a process is written that leaves its group."""
  return (_ROOT / 'cpu' if (_ROOT / 'cpu').is_dir() else _ROOT) / _MEMBERS
