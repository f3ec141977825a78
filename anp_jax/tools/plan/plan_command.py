"""Plans what the flags ask for."""

import argparse
import dataclasses
import json
import math
import re

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import command_line, errors, outputs, strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.system import compute_dtype, progress
from anp_jax.tools import flag_values, input_cost
from anp_jax.tools.plan import (
  machines as machines_lib,
  plan_goodput,
  plan_page,
  plan_tables,
  plan_target,
  points as points_lib,
  published_rates,
  sizes,
  workload as workload_lib,
)

_ABOVE_0 = 'images_per_device examples classes target_hours budget_devices mtbf'.split()
_FROM_0 = 'jitter repair restart_seconds elastic_seconds'.split()
# What follows a failure, where no flag says it.
_AFTER_FAILURES = {'repair': 1.0, 'restart_seconds': 180.0, 'elastic_seconds': 10.0}
_FSDP, _MEASURED = 'fsdp', 'measured'
_SERVERS = tuple(f'parameter_server:{mode}' for mode in ('async', 'rennala', 'synchronous'))
# What a target is looked for with, where no flag says it.
_TARGET_DEVICES = 'a100-80,h100,h200,b200'
_TARGET_LINK = 'ib-ndr400x8'
# How more of a measured device are joined, where no flag says it.
_MEASURED_NODES = '1,2,4,...,64'
_MEASURED_LINK = 'eth-10'
_TARGET_STRATEGIES = 'sync,fsdp,local_sgd,parameter_server:async,parameter_server:synchronous'
_NAMES = (*strategy_lib.BUILT_IN, _FSDP, *_SERVERS)


def run(
  known_tables: plan_tables.Tables, flags: argparse.Namespace, overrides: dict[str, str]
) -> int:
  """Prints the plan and draws it; returns the exit status.

  Raises:
    ConfigError: for whatever is wrong with the flags or the config.
  """
  _complete(flags)
  _check_values(flags)
  if flags.target_hours or flags.budget_devices:
    _complete_target(flags)
  configs = _configs(flags, overrides)
  _check_sizes(known_tables, flags, configs)
  if flags.measure:
    configs = {n: compute_dtype.decide(c, '') for n, c in configs.items()}
  first = next(iter(configs.values()))
  cost = workload_lib.count(first, flags.examples or 0, flags.classes or 0)
  request, input_speed = _request(flags, first)
  machines = machines_lib.from_flags(known_tables, flags, configs, cost)
  plans = {}
  for machine in machines:
    for name, config in configs.items():
      label = f'{machine.device.name} {name}' if len(machines) > 1 else name
      # Strategies and their keys change nothing that is counted, but models.
      settings = machine.settings(config, cost)
      plans[label] = points_lib.plan(label, settings, request)
      if flags.mtbf:
        host = known_tables.device('cpu')
        plans[label] = plan_goodput.added(plans[label], settings, request, flags, host)
      plans[label] = machine.with_intervals(plans[label], settings)
  _check_that_some_run(plans)
  names = ', '.join(m.device.name for m in machines)
  link = f', {flags.link}' if flags.link else ''
  title = f'{flags.config}, {cost.dtype}, {names}, {flags.devices_per_node} a node{link}'
  print(title)
  if flags.typed_link and all(m.clusters[0].is_torus for m in machines):
    ignoring = [n for n, c in configs.items() if strategy_lib.find(c).steps_together]
    if ignoring:
      print(
        f"{', '.join(ignoring)}: the devices' own links join the nodes; "
        f'--link={flags.link} is not used'
      )
  print(
    f'{cost.image_flops / 1e9:.3g} GFLOP an image, {cost.parameters:,} '
    f'parameters, {cost.examples:,} images an epoch'
  )
  host_cores = ', '.join(f'{m.device.host_cores * flags.devices_per_node:g}' for m in machines)
  print(f'input: {input_speed}; {host_cores} cores a node\n')
  result = {
    'devices': [m.device.name for m in machines],
    'link': flags.link,
    'points': [p.to_json() for points in plans.values() for p in points],
  }
  if machines[0].measurement:
    result['measured'] = machines[0].measurement.to_json()
  status = _show(flags, plans, result)
  if flags.out:
    _draw(flags.out, title, plans, machines_lib.published_rates(machines, cost, flags.software))
  print(json.dumps(result))
  return status


def _show(flags, plans, result) -> int:
  """Prints the table, or the ranking of a target; adds it to the result."""
  if not flags.target_hours:
    print(plan_page.lines(plans))
    if flags.mtbf:
      print(f'\n{plan_page.goodput(plans, flags.mtbf, flags.repair)}')
    return 0
  ranked = plan_target.ranked(plans, flags.target_hours)
  result['ranking'] = [p.to_json() for p in ranked]
  budget = f'{flags.budget_devices:,} devices'
  if ranked:
    best = ranked[0]
    print(plan_page.ranking(ranked))
    print(
      f'\ncheapest within {flags.target_hours:g} h and {budget}: '
      f'{best.strategy} on {best.cluster.nodes} nodes, '
      f'{best.device_hours:,.3g} device-hours (time to the images of the run; '
      'accuracy by strategy: docs/strategies.md)'
    )
    return 0
  best = plan_target.quickest(plans)
  print(plan_page.ranking([best]))
  print(
    f'\nno way reaches {flags.target_hours:g} h with {budget}; the quickest, '
    f'{best.strategy} on {best.cluster.nodes} nodes, takes '
    f'{progress.duration(best.run_seconds)}'
  )
  return 1


def _complete(flags):
  """Fills in the sizes that no flag names."""
  flags.typed_nodes, flags.typed_link = flags.nodes, flags.link
  if flags.measure:
    flags.nodes = flags.nodes or _MEASURED_NODES
    flags.link = flags.link or _MEASURED_LINK
    if flags.devices_per_node is None:
      import jax  # opens the device, which is about to be timed

      flags.devices_per_node = jax.local_device_count()
  for name, value in _AFTER_FAILURES.items():
    if getattr(flags, name) is None:
      setattr(flags, name, value)
  flags.nodes = flags.nodes or '1'
  if flags.devices_per_node is None:
    flags.devices_per_node = 8


def _check_values(flags):
  """Refuses values that no plan takes, and files that cannot be written."""
  for name, choices in (('scaling', sizes.SCALINGS), ('software', published_rates.SOFTWARE)):
    value = getattr(flags, name)
    errors.check_choice(f'--{name}={value!r}', value, choices)
  for name in (*_ABOVE_0, *_FROM_0):
    value, word = getattr(flags, name), 'from' if name in _FROM_0 else 'above'
    if value is not None and not (0 < value < math.inf or value == 0 and word == 'from'):
      raise config_lib.ConfigError(f'--{name}={value}: expected a number {word} 0')
  for name, word in (('mtbf', ''), ('repair', '0, or ')):
    value = getattr(flags, name)  # in floats, times beyond these have no rates
    if value and not 1e-6 <= value <= 1e9:
      raise config_lib.ConfigError(f'--{name}={value}: expected {word}hours from 1e-6 to 1e9')
  if flags.devices_per_node < 1:
    raise config_lib.ConfigError(
      f'--devices_per_node={flags.devices_per_node}: expected a whole number from 1'
    )
  if flags.out:
    outputs.check_file('--out', flags.out, ('.png',))
  rate = flags.input_rate
  is_number = rate and re.fullmatch(r'\d+(\.\d*)?', rate) and float(rate) > 0
  if rate not in (None, _MEASURED) and not is_number:
    raise config_lib.ConfigError(
      f'--input_rate={rate!r}: expected {_MEASURED}, or images/s of a node, above 0'
    )


def _request(flags, config) -> tuple[points_lib.Request, str]:
  """What the flags ask for, and how fast a node's input is, for people."""
  request = points_lib.Request(flags.scaling, flags.images_per_device or 0)
  if flags.input_rate == _MEASURED:
    source = sources.open_source(config, training=True)
    if not source.has_images:
      raise config_lib.ConfigError(
        f'--input_rate={_MEASURED}: {source.name} has no images to decode; expected a number'
      )
    cost = input_cost.measure(config, source)
    request = dataclasses.replace(request, image_seconds=sum(cost))
    return request, f'{cost.text()}, of {source.name}'
  if flags.input_rate:
    rate = float(flags.input_rate)
    return dataclasses.replace(request, input_rate=rate), f'{rate:,g} images/s a node'
  text = f'{1e3 * points_lib.input_seconds(config):.3g} ms of a core an image'
  return request, f'{text}, assumed: --input_rate={_MEASURED} times yours'


def _complete_target(flags):
  """Fills in the flags of a target; refuses one without hours or budget."""
  for name in ('target_hours', 'budget_devices'):
    if not getattr(flags, name):
      raise config_lib.ConfigError(
        f'--{name} is missing: a target has hours and a budget of '
        'devices, such as --target_hours=2 --budget_devices=256'
      )
  if flags.budget_devices < flags.devices_per_node:
    raise config_lib.ConfigError(
      f'--budget_devices={flags.budget_devices}: fewer than a node has '
      f'(--devices_per_node={flags.devices_per_node})'
    )
  if not flags.device and not flags.measure:
    flags.device = _TARGET_DEVICES
  flags.link = flags.link or _TARGET_LINK
  flags.strategies = flags.strategies or _TARGET_STRATEGIES
  if flags.typed_nodes:
    most = max(flag_values.numbers('--nodes', flags.nodes)) * flags.devices_per_node
    if most > flags.budget_devices:
      raise config_lib.ConfigError(
        f'--nodes={flags.nodes}: {most:,} devices, over --budget_devices={flags.budget_devices}'
      )
    return
  if flags.budget_devices > sizes.MOST_DEVICES:
    raise config_lib.ConfigError(
      f'--budget_devices={flags.budget_devices}: expected {sizes.MOST_DEVICES:,} at most'
    )
  counts = plan_target.node_counts(flags.budget_devices, flags.devices_per_node)
  flags.nodes = ','.join(map(str, counts))


def _configs(flags, overrides) -> dict[str, ml_collections.ConfigDict]:
  """The config of each strategy, by its name as typed."""
  if not flags.config:
    raise config_lib.ConfigError('--config=FILE[:VARIANT] is missing; see configs/')
  if not flags.strategies:
    config = command_line.load(flags.config, overrides)
    return {config.strategy.name: config}
  result = {}
  for name in [n.strip() for n in flags.strategies.split(',')]:
    errors.check_choice(f'--strategies={name}', name, _NAMES)
    base, _, mode = name.partition(':')
    typed = dict(overrides)
    if base == _FSDP:
      typed['sharding'] = "(('.*', 'fsdp'),)"
    typed['strategy.name'] = 'sync' if base == _FSDP else base
    if mode:
      typed['strategy.mode'] = mode
    # The file may be of a strategy with another mesh.
    typed = strategy_lib.by_name(typed['strategy.name']).planned_mesh | typed
    applying = command_line.applying(flags.config, typed)
    result[name] = command_line.load(flags.config, applying)
  return result


def _check_sizes(known_tables, flags, configs):
  """Refuses sizes and links before anything is counted or timed."""
  counts = flag_values.numbers('--nodes', flags.nodes)
  if flags.link:
    known_tables.link('--link', flags.link)
  if max(counts) * flags.devices_per_node > sizes.MOST_DEVICES:
    raise config_lib.ConfigError(
      f'--nodes={flags.nodes}: {max(counts) * flags.devices_per_node:,} '
      f'devices, expected {sizes.MOST_DEVICES:,} at most'
    )
  for name, config in configs.items():
    # Otherwise the devices' own links join them.
    is_by_host = not strategy_lib.find(config).steps_together
    if max(counts) > 1 and is_by_host and not flags.link:
      raise config_lib.ConfigError(
        f"--link=NAMExPORTS is missing: what joins the nodes' hosts, over "
        f'which {name!r} sends, such as ib-ndr400x8'
      )
    if is_by_host and flags.mtbf:
      raise config_lib.ConfigError(
        f'--mtbf={flags.mtbf:g} with the strategy {name!r}: expected strategies whose devices '
        'compute each step together; the others of this one go on without a lost process'
      )


def _check_that_some_run(plans):
  """Refuses a plan without a size that can run, with the first reason."""
  points = [p for ps in plans.values() for p in ps]
  if not any(p.runs for p in points):
    raise config_lib.ConfigError(f'the config fits none of these sizes: {points[0].why_not}')


def _draw(path, title, plans, rates):
  """Draws the plans that have a size that runs."""
  running = {name: points for name, points in plans.items() if any(p.runs for p in points)}
  plan_page.draw(path, title, running, rates)
  print(f'\nplan: {path}')
