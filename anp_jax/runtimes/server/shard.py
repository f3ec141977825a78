"""One server's slice of the state, and its update, compiled for a CPU."""

import functools
import os
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.runtimes.server import layout
from anp_jax.training import multipliers

# Elements that one call of the compiled update takes, padded with zeros. One
# size, so one program: an element's bits do not depend on how the weights are
# cut. (Compiled for each slice's own shapes, Adam's did.)
_BLOCK = 2**18


@struct.dataclass
class BlockState:
  """A part of a server's slice.

  Attributes:
    params: (_BLOCK,) weights, or (_BLOCK, 1) of matrices.
    opt_state: of the optax chain.
    average: like params, averaged over steps; (0,) without config.ema.
    wire: like params: the weights as they travel, of now or of later.
  """

  params: Any
  opt_state: Any
  average: Any
  wire: Any


@struct.dataclass
class SliceState:
  """A server's part of the TrainState.

  Attributes:
    step: () int32, updates applied.
    stats: (m,) the network's running statistics; (0,) but on server 0.
    average: (m,) the same averaged over steps; (0,) without config.ema.
    blocks: tuple of BlockState.
  """

  step: Any
  stats: Any
  average: Any
  blocks: Any


class Shard:
  """Makes and updates one server's slices.

  The chain is that of `optimizer.create` without its clipping by norm, which
  the workers have done, and without multipliers, of which a slice has a vector:
  what is left looks at single elements (and at the rank of their leaves), so a
  slice's update is the slice of the whole's update.

  Attributes:
    part: the slice.
    stats_size: of the statistics; 0 but on server 0.
    device: that it computes on.
  """

  def __init__(
    self, config, optimizer, flats, part: layout.Slice, first: bool,
    ahead: float,
  ):  # fmt: skip
    """Makes it; nothing is compiled yet.

    Args:
      config: the run's config.
      optimizer: the chain, from `optimizer.create` with whole=False.
      flats: (params, stats) as `layout.Flat`.
      part: the slice.
      first: whether this is server 0, which keeps the statistics.
      ahead: updates that the weights which travel are ahead, if all were as the
        last one was. A gradient then is of the weights that it will meet, about
        (Chen et al., "SpecTrain", 2018, arXiv 1809.02839; Kosson et al., MLSys
        2021, arXiv 2003.11666).
    """
    self._config = config
    self._ahead = ahead
    self._flats = flats
    self._optimizer = optimizer
    self._blocks = part.blocks(_BLOCK)
    self.part = part
    self.stats_size = flats[1].size if first else 0
    self.device = _cpu()
    rules = config.optimizer.multipliers
    self._rules = rules
    frozen = multipliers.Frozen(rules, flats[0].tree(np.zeros(flats[0].size)))
    self._kept = flats[1].spread(frozen.is_kept)[: self.stats_size] > 0
    self._update = jax.jit(self._updated)
    self._update_stats = jax.jit(self._updated_stats)

  @functools.cached_property
  def like(self) -> SliceState:
    """Shapes and dtypes of the slice's state."""
    return jax.eval_shape(self._zeros)

  @property
  def gradient_like(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the slice of a gradient, as it travels."""
    return jax.ShapeDtypeStruct((self.part.size,), wire_dtype(self._config))

  def start(self, state) -> SliceState:
    """The slice of a whole state.

    Args:
      state: TrainState of NumPy arrays.
    """
    params, stats = self._flats
    of_block = _by_prefix(state.opt_state, params)
    average = state.average or {'params': state.params, 'stats': state.stats}
    weights, averages = (
      self._cut(params.vector(tree, np))
      for tree in (state.params, average['params'])
    )

    def leaf(block, path, like):
      value = of_block[mesh_lib.path_name(path)]
      return block.cut(self._cut(value), _BLOCK) if like.ndim else value

    blocks = []
    for block, like in zip(self._blocks, self.like.blocks, strict=True):
      mine = block.cut(weights, _BLOCK)
      blocks.append(
        BlockState(
          params=mine,
          opt_state=jax.tree_util.tree_map_with_path(
            functools.partial(leaf, block), like.opt_state
          ),
          average=block.cut(averages, _BLOCK) if self._config.ema else
          np.zeros(0, params.dtype),
          wire=mine.astype(wire_dtype(self._config)),
        )
      )  # fmt: skip
    kept = self.stats_size
    made = SliceState(
      step=np.asarray(state.step),
      stats=stats.vector(state.stats, np)[:kept],
      average=stats.vector(average['stats'], np)[: self.like.average.size],
      blocks=tuple(blocks),
    )
    return jax.device_put(made, self.device)

  def weights(self, state: SliceState) -> list[np.ndarray]:
    """The slice's (n,) weights as they travel, in parts."""
    return [
      np.asarray(b.wire).reshape(-1)[: block.stop - block.start]
      for b, block in zip(state.blocks, self._blocks, strict=True)
    ]

  def apply(self, state, gradients, terms, weights, staleness: int):
    """The state after an update.

    Args:
      state: SliceState.
      gradients: (n,) arrays, of one batch's parts in order.
      terms: (m,) arrays beside them, of the statistics.
      weights: of examples in each part.
      staleness: updates between the gradients' reading and this one.

    Returns:
      SliceState, and whether all of it is finite.
    """
    divisor = 1.0
    if self._config.strategy.compensation == 'staleness':
      divisor = float(max(staleness, 1))
    dtype = self._flats[0].dtype
    shares = np.asarray(weights, dtype) / max(sum(weights), 1)
    if len(gradients) == 1:  # a mean already
      shares = np.ones(1, dtype)
    step, shares, divisor = jax.device_put(
      (state.step, shares, np.asarray(divisor, dtype)), self.device
    )
    stats, average, finite = self._update_stats(
      step, state.stats, state.average, jax.device_put(terms, self.device)
    )
    blocks, found = [], [finite]
    for block, old, factors in zip(
      self._blocks, state.blocks, self._factors, strict=True
    ):
      cut = [block.cut(g, _BLOCK) for g in gradients]
      new, finite = self._update(
        step, old, jax.device_put(cut, self.device), shares, divisor, factors
      )
      blocks.append(new)
      found.append(finite)
    state = SliceState(step + 1, stats, average, tuple(blocks))
    return state, all(bool(f) for f in found)

  @functools.cached_property
  def _factors(self):
    """Of each block, what updates are multiplied by; None without rules."""
    if not self._rules:
      return [None] * len(self._blocks)
    whole = self._flats[0].spread(
      functools.partial(multipliers.factor, self._rules)
    )
    cut = self._cut(whole)
    return jax.device_put(
      [block.cut(cut, _BLOCK) for block in self._blocks], self.device
    )

  def _cut(self, vector):
    return vector[self.part.start : self.part.stop]

  def _zeros(self):
    dtype = self._flats[0].dtype
    blocks = []
    for block in self._blocks:
      params = jnp.zeros((_BLOCK, 1) if block.is_matrix else _BLOCK, dtype)
      blocks.append(
        BlockState(
          params=params,
          opt_state=self._optimizer.init(params),
          average=params if self._config.ema else jnp.zeros(0, dtype),
          wire=params.astype(wire_dtype(self._config)),
        )
      )
    stats = jnp.zeros(self.stats_size, dtype)
    average = stats if self._config.ema else stats[:0]
    return SliceState(jnp.zeros((), jnp.int32), stats, average, tuple(blocks))

  def _updated(self, step, state, gradients, shares, divisor, factors):
    """A block's update, and whether it is finite."""
    dtype = state.params.dtype
    gradient = sum(s * g.astype(dtype) for s, g in zip(shares, gradients))
    updates, opt_state = self._optimizer.update(
      gradient, state.opt_state, state.params
    )
    if factors is not None:
      updates = jnp.where(factors > 0, updates * factors, 0)
    updates = updates / divisor
    params = state.params + updates
    if factors is not None:  # to the bit, also the sign of a zero
      params = jnp.where(factors > 0, params, state.params)
    later = params + self._ahead * updates if self._ahead else params
    state = BlockState(
      params=params,
      opt_state=opt_state,
      average=self._averaged(step, state.average, params),
      wire=later.astype(wire_dtype(self._config)),
    )
    return state, jnp.isfinite(updates).all()

  def _updated_stats(self, step, stats, average, terms):
    kept = jnp.asarray(self._config.model.norm_momentum, stats.dtype)
    new = kept * stats + sum(terms) / len(terms)
    stats = jnp.where(self._kept, stats, new) if self._kept.any() else new
    return (
      stats, self._averaged(step, average, stats), jnp.isfinite(stats).all()
    )  # fmt: skip

  def _averaged(self, step, old, new):
    if not self._config.ema:
      return old
    decay = state_lib.ema_decay(self._config.ema, step).astype(new.dtype)
    return old + (1 - decay) * (new - old)


def _cpu():
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError as e:
    raise config_lib.ConfigError(
      f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")!r}: servers compute '
      'on the CPU, which has to be among them'
    ) from e


def wire_dtype(config):
  """Of weights and gradients on their way."""
  # A float64 run is there to be exact: nothing of it is narrowed.
  wide = config.model.param_dtype
  return jnp.dtype(wide if wide == 'float64' else config.strategy.wire_dtype)


def whole(flats, shards, states, like) -> state_lib.TrainState:
  """The TrainState of all servers' slices, as NumPy arrays.

  Args:
    flats: (params, stats) as `layout.Flat`.
    shards: Shard of each server.
    states: SliceState of each server, with the same step.
    like: TrainState of shapes.
  """
  params, stats = flats
  pairs = [
    (block, made)
    for shard, state in zip(shards, states, strict=True)
    for block, made in zip(shard._blocks, state.blocks, strict=True)
  ]

  def joined(get):
    return np.concatenate(
      [
        np.asarray(get(made)).reshape(-1)[: block.stop - block.start]
        for block, made in pairs
      ]
    )

  def of_chain(i):
    return lambda made: jax.tree.leaves(made.opt_state)[i]

  first = pairs[0][1].opt_state
  found = {}
  for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(first)):
    name = mesh_lib.path_name(path)
    if not leaf.ndim:
      found[name] = np.asarray(leaf)
      continue
    tree = params.tree(joined(of_chain(i)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      found[f'{name}/{mesh_lib.path_name(path)}'] = leaf
  average = {}
  if like.average:
    average = {
      'params': params.tree(joined(lambda made: made.average)),
      'stats': stats.tree(np.asarray(states[0].average)),
    }
  return state_lib.TrainState(
    step=np.asarray(states[0].step),
    params=params.tree(joined(lambda made: made.params)),
    stats=stats.tree(np.asarray(states[0].stats)),
    opt_state=jax.tree_util.tree_map_with_path(
      lambda path, _: found[mesh_lib.path_name(path)], like.opt_state
    ),
    average=average,
  )


def _by_prefix(opt_state, flat):
  """What a chain over one leaf has where this one has a tree of parameters.

  Returns:
    path -> () array, or (n,) vector of all parameters' leaves.
  """
  found, parts = {}, {}
  names = set(flat.names)
  for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
    for i in range(len(path)):
      name = mesh_lib.path_name(path[i:])
      if name in names:
        parts.setdefault(mesh_lib.path_name(path[:i]), {})[name] = leaf
        break
    else:
      found[mesh_lib.path_name(path)] = leaf
  for prefix, leaves in parts.items():
    found[prefix] = np.concatenate([np.ravel(leaves[n]) for n in flat.names])
  return found
