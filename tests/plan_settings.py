"""What the tests of plan share: devices, links and nodes of round numbers, and the page."""

import re

from anp_jax.costs import collectives, device_step, hardware, steps
from anp_jax.tools.plan import plan_tables
from tests import launching, typed_commands

# docs/planner.md with each paragraph in one line.
PAGE = ' '.join((launching.ROOT / 'docs/planner.md').read_text().split())
# 1 GB/s and nothing but bytes; and what takes no time.
LINK = hardware.Link('link', 1e9, 1e-9)
FAST = hardware.Link('fast', 1e18, 1e-15)
PERFECT = device_step.Efficiency(1.0, 1e9, 1e-9, 1.0, overlap=0.0)


def setting(config, cost, nodes, devices=1, link=LINK, **fields) -> steps.Setting:
  """Returns nodes of H200s that reach their data sheets, and whose passes are all alike.

  Args:
    config: the run's config.
    cost: its `Workload`.
    nodes: their number.
    devices: those of a node, between which data take no time.
    link: between nodes.
    **fields: others of `Setting`.
  """
  cluster = collectives.Cluster(nodes, devices, FAST, link)
  device = plan_tables.load().device('h200')
  fields = {'efficiency': PERFECT, 'jitter': 0.0, **fields}
  return steps.Setting(config, cost, device, cluster, **fields)


def page_arguments(words: str) -> list[str]:
  """Returns the arguments of the only command of docs/planner.md that has these words."""
  text = (launching.ROOT / 'docs/planner.md').read_text().replace('\\\n', ' ')
  (line,) = [line for line in re.findall(r'^    (.*)$', text, re.M) if words in line]
  ((_, arguments),) = typed_commands.split(line)
  return arguments
