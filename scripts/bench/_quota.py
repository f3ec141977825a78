"""Processes that get a part of a core, by a cgroup of Linux."""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib
import tempfile
import time

_ROOT = pathlib.Path('/sys/fs/cgroup')
_PERIOD = 10_000  # microseconds


@contextlib.contextmanager
def limited(percent: int) -> Iterator[Sequence[str]]:
  """Makes a group of processes that get a part of a core together.

  Args:
    percent: part of a core.

  Yields:
    The beginning of a command line, before the command that runs in the group.
  """
  is_first_version, quota = (_ROOT / 'cpu').is_dir(), _PERIOD * percent // 100
  try:
    folder = _ROOT / 'cpu' if is_first_version else _ROOT
    group = pathlib.Path(tempfile.mkdtemp(prefix='anp_jax_', dir=folder))
    if is_first_version:
      (group / 'cpu.cfs_period_us').write_text(str(_PERIOD))
      (group / 'cpu.cfs_quota_us').write_text(str(quota))
    else:
      (group / 'cpu.max').write_text(f'{quota} {_PERIOD}')
  except OSError as e:
    raise SystemExit(f'error: --quotas: a cgroup is expected at {_ROOT}, as root: {e}') from None
  try:
    yield 'sh', '-c', f'echo $$ >{group}/cgroup.procs && exec "$@"', 'sh'
  finally:
    while (group / 'cgroup.procs').read_text():  # its processes are about to end
      time.sleep(0.1)
    group.rmdir()
