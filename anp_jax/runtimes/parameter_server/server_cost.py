"""Seconds of a step of `parameter_server`: how often workers finish a gradient.

On a GPU or TPU a worker's host pulls, pushes and updates while the device
computes for others. On a CPU the cores that compute do all of it, so that a
server's own worker is the slower the more gradients it serves.
"""

import dataclasses

from anp_jax.costs import collectives, device_step, order_statistics, steps
from anp_jax.runtimes.parameter_server import scheduler

# A host updates weights in its memory at about this rate, bytes/s: assumption
# for the optimizer of `parameter_server`, which streams all state through a few cores.
_HOST_UPDATE = 20e9
_ITERATIONS = 200
_LEAST = 1e-3  # of a core, for the worker of a server that has no time for it


@dataclasses.dataclass(frozen=True)
class Cycle:
  """What all workers do between two gradients of one of them.

  Attributes:
    seconds: seconds that it takes.
    useful: gradients that are applied.
    updates: updates of the weights.
  """

  seconds: float
  useful: int
  updates: int


def predicted_step(setting: steps.Setting, images: int) -> steps.Step:
  """An update of the weights: workers of a node each pull them and push gradients."""
  alike = dataclasses.replace(setting, slow=())
  node = dataclasses.replace(setting.cluster, nodes=1)
  inner = steps.synchronous(alike, images, cluster=node)
  rounds = cycle(setting, inner.seconds)
  gradients = rounds.useful / rounds.updates
  # Workers divide the passes of an update, or each makes one at a time with all others.
  passes = 1 if setting.config.strategy.mode == 'synchronous' else gradients / rounds.updates
  compute, fixed = passes * inner.compute, passes * inner.fixed
  return steps.Step(
    images=images * setting.cluster.devices * gradients,
    compute=compute,
    fixed=fixed,
    communication=rounds.seconds / rounds.updates - compute - fixed,
  )


def cycle(setting: steps.Setting, busy: float) -> Cycle:
  """A cycle of config.strategy, in any of its modes.

  Args:
    setting: what is planned for.
    busy: seconds of a worker's pass, its node's devices together.
  """
  s, cluster = setting.config.strategy, setting.cluster
  workers = max(1, cluster.nodes - s.servers * bool(s.dedicated))
  servers = min(s.servers, cluster.nodes)
  size = setting.workload.parameters * device_step.width(setting.config.model.param_dtype)
  link = setting.effective.link
  update = _update(setting, servers)
  # What a worker sends to the server of its own process passes no port.
  is_local = servers == 1 and not s.dedicated
  sending = workers - is_local
  transfer = 2 * collectives.send(link, size) if cluster.nodes > 1 else 0.0
  if s.mode == 'synchronous':
    late = order_statistics.slowest(busy, setting.jitter, workers, s.backup_workers, setting.slow)
    port = sending * size / servers / link.bandwidth
    seconds = late + max(transfer, 2 * port) + update
    if setting.handling:
      seconds += setting.sharing * setting.handling[0]
      seconds += (workers - 1) * setting.handling[1] / servers
    return Cycle(seconds, max(1, workers - s.backup_workers), 1)
  factors = [*setting.slow, *[1.0] * workers][:workers]
  # One in flight travels while another is computed.
  away = busy - transfer * (s.in_flight > 1)
  transfer += 2 * _wait_at_port(sending, max(0.0, away), size / servers / link.bandwidth)
  if setting.handling:
    cycles = _cycles_on_cores(setting, [f * busy for f in factors], is_local, transfer, servers)
  else:
    transit = [transfer + update] * sending + [update] * is_local
    cycles = [_cycle(setting, f * busy, t) for f, t in zip(factors, transit)]
  rate = sum(1 / seconds for seconds in cycles[:sending])
  rate = min(rate, servers * link.bandwidth / size)
  rate += sum(1 / seconds for seconds in cycles[sending:])
  parts = scheduler.data_shards(setting.config, workers)
  if s.mode == 'rennala':
    rate = min(rate, parts / _collecting(setting, parts, cycles, busy))
  seconds = max(workers * parts / rate, workers * update)
  return Cycle(seconds, workers * parts, workers)


def _collecting(setting, parts, cycles, busy) -> float:
  """Seconds of an update of `rennala`: all begin again after it, and it takes the first gradients.

  Args:
    setting: what is planned for.
    parts: gradients that it takes.
    cycles: mean seconds between two gradients of each worker.
    busy: those of them that the worker computes, which vary.
  """
  last = sorted(n * seconds for seconds in cycles for n in range(1, parts + 1))[parts - 1]
  # Of each worker one gradient, the nearest to the last, may or may not be in time; n of them
  # in turn vary by a root of n more than one.
  counts = [max(1, round(last / seconds)) for seconds in cycles]
  jitter = setting.jitter * busy / min(cycles) * (len(cycles) / sum(counts)) ** 0.5
  ends = [n * seconds for n, seconds in zip(counts, cycles)]
  return order_statistics.slowest(1.0, jitter, len(ends), sum(counts) - parts, ends)


def _update(setting, servers):
  """Seconds of a server with a gradient, of its slice."""
  if setting.handling:
    return setting.handling[1] / servers
  return setting.workload.state_bytes * 2 / servers / _HOST_UPDATE


def _wait_at_port(workers, away, alone) -> float:
  """How much longer a message takes at a server's port that workers share.

  The exact mean value analysis (Reiser and Lavenberg, JACM 1980) of a port that
  passes each way what is there at a time in equal parts, as TCP does.

  Args:
    workers: workers that pull and push through the port.
    away: seconds of a cycle in which a worker has no message at the port.
    alone: seconds of a message that has the port to itself.
  """
  messages, seconds = 0.0, alone
  for count in range(1, workers + 1):
    seconds = alone * (1 + messages)
    messages = count * seconds / (away + 2 * seconds)
  return seconds - alone


def _cycle(setting, busy, transit) -> float:
  """Seconds between two gradients of a worker that waits for nobody else."""
  if setting.config.strategy.in_flight > 1:
    return max(busy, transit)
  # Of workers that share a core, one computes while another sends.
  return max(busy, busy / setting.sharing + transit)


def _cycles_on_cores(setting, passes, is_local, transfer, servers):
  """Seconds between two gradients of each worker, whose cores do everything.

  A process has a core, or shares one with others.

  Args:
    setting: with `handling`.
    passes: seconds of each worker's, as long as its core is shared; the last
      worker's is in the process of the server, if that is local.
    is_local: whether a worker sends to its own process.
    transfer: seconds of a worker's messages, both ways.
    servers: servers that divide the weights, each on another core.
  """
  at_worker, at_server = setting.handling
  share = at_server / servers
  works = [seconds / setting.sharing + at_worker for seconds in passes]
  waits = [transfer + share] * len(works)  # servers answer at the same time
  if is_local:  # what it would wait for is its own core's work
    works[-1], waits[-1] = works[-1] + share, 0.0
  s = setting.config.strategy
  cores = max(1, round(setting.cluster.nodes / setting.sharing))
  first = s.servers * bool(s.dedicated)  # servers come first
  places = [(first + i) % cores for i in reversed(range(len(works)))]
  rates = [0.0] * len(works)
  # Twice, since servers' cores depend on each other's workers.
  for core in [*reversed(range(cores))] * 2:
    members = [i for i, place in enumerate(places) if place == core]
    core_rates = _rates(
      [(works[i], waits[i]) for i in members],
      s.in_flight,
      share * sum(i % cores == core for i in range(servers)),
      sum(r for i, r in enumerate(rates) if i not in members),
    )
    for i, rate in zip(members, core_rates):
      rates[i] = rate
  return [1 / rate for rate in rates]


def _rates(members, in_flight, served, elsewhere) -> list[float]:
  """Gradients a second of the workers on one core.

  The approximate mean value analysis of Bard and Schweitzer, with a customer of
  each class: a worker that comes to the core finds the others there as often as
  they are there at all, and all share it in equal parts. What is served comes
  at any time, and takes its part of the core.

  Args:
    members: (seconds of work, seconds of waiting) of each worker's gradient.
    in_flight: gradients of a worker at a time; it computes one of them.
    served: seconds of work for every gradient of the run; 0: it serves none.
    elsewhere: gradients a second of the workers on other cores.
  """
  present = [1.0] * len(members)  # share of the time in which each is there
  rates = [0.0] * len(members)
  for _ in range(_ITERATIONS):
    # Its own part of what is served is a local worker's own work.
    foreign = sum(r for r, (_, wait) in zip(rates, members) if wait)
    left = max(_LEAST, 1 - served * (elsewhere + foreign))
    for i, (work, wait) in enumerate(members):
      customers = 1 + sum(present) - present[i]
      there = work * customers / left
      rates[i] = min(1 / there, in_flight / (there + wait))
      present[i] = rates[i] * there
  return rates
