"""How much memory of the host a process may still take."""

import contextlib
import math
import pathlib
import re

# Of the two versions of cgroups: files of the limit and of what is used, by the name of
# the controller in /proc/self/cgroup.
_FILES = {
  '': ('memory.max', 'memory.current'),
  'memory': ('memory.limit_in_bytes', 'memory.usage_in_bytes'),
}


def available(root: str = '/') -> float:
  """Returns bytes: what the host has, or the cgroups that this process is in allow.

  Caches of files count as free, as the kernel gives them up.

  Args:
    root: folder that holds proc and sys.
  """
  folder = pathlib.Path(root)
  result = math.inf
  with contextlib.suppress(OSError):
    text = (folder / 'proc/meminfo').read_text()
    if match := re.search(r'^MemAvailable: +(\d+) kB', text, re.M):
      result = 1024 * int(match[1])
  with contextlib.suppress(OSError):
    for line in (folder / 'proc/self/cgroup').read_text().splitlines():
      _, controller, path = line.split(':', 2)
      if controller in _FILES:
        top = folder / 'sys/fs/cgroup' / controller
        place = top / path.lstrip('/')
        inside = [place, *place.parents]
        result = min(
          result, *(_left(p, *_FILES[controller]) for p in inside if top in (p, *p.parents))
        )
  return result


def _left(folder, limit, used):
  try:
    cached = re.search(
      r'^(?:total_)?inactive_file (\d+)$', (folder / 'memory.stat').read_text(), re.M
    )
    left = int((folder / limit).read_text()) - int((folder / used).read_text())
  except (OSError, ValueError):  # 'max', or no such cgroup in this container
    return math.inf
  return left + (int(cached[1]) if cached else 0)
