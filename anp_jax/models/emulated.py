"""A network whose forward and backward pass are sleeps.

It has the parameters and statistics of another network, and gradients of their
shapes, all zeros, which are there when a real backward pass would have them. So
any strategy trains it as it is: what travels, and when, is real, and the
computing takes no core.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import time
from typing import Any, Literal

from flax import linen as nn, traverse_util
import jax
from jax import lax
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax.system import emulation

# Share of the forward pass: a convolution's gradients, of its input and its
# kernel, take as many operations each as its output.
_FORWARD = 1 / 3
# Arrays that hold `megabytes`: each costs a tenth of a second to compile, in
# every process.
_ARRAYS = 16
_TOKEN = jax.ShapeDtypeStruct((), np.float32)


@dataclasses.dataclass(eq=False)
class Emulated:
  """Stands for a Flax module, with its `init` and `apply`.

  Attributes:
    network: Flax module that it stands for.
    settings: config.emulate.
    clock: monotonic clock, in seconds.
    sleep: function that waits for a number of seconds.
  """

  network: nn.Module
  settings: ml_collections.ConfigDict
  clock: Callable[[], float] = time.monotonic
  sleep: Callable[[float], None] = time.sleep
  _order: list[tuple] = dataclasses.field(default_factory=list, init=False)

  def init(self, rngs: Any, images: jax.Array, train: bool) -> dict:
    """The network's variables, all zeros.

    Args:
      rngs: keys, as for a Flax module.
      images: (n, side, side, 3).
      train: argument of the network.

    Returns:
      Arrays by collection and path, in the order in which the network makes
      them.
    """
    if self.settings.megabytes:
      params = _pieces(self.settings.megabytes)
      self._order = list(traverse_util.flatten_dict(params))
      return {'params': params}
    order = []

    def make():
      variables = dict(self.network.init(rngs, images, train))
      order.extend(traverse_util.flatten_dict(variables))
      return variables

    # The order of a pytree is alphabetical.
    shapes = traverse_util.flatten_dict(jax.eval_shape(make))
    self._order = [path[1:] for path in order if path[0] == 'params']
    return traverse_util.unflatten_dict(
      {path: jnp.zeros(shapes[path].shape, shapes[path].dtype) for path in order}
    )

  def apply(
    self,
    variables: Any,
    images: jax.Array,
    train: bool,
    mutable: Literal[False] | Sequence[str] = False,
    rngs: Any = None,
  ) -> Any:
    """Outputs of zeros; training waits for as long as a real pass takes.

    Args:
      variables: result of `init`.
      images: (n, side, side, 3); only their number counts.
      train: whether the passes take time; those of an evaluation do not.
      mutable: collections that are returned with the outputs; False: none.
      rngs: training's key 'dropout', from which the time is drawn.

    Returns:
      (n, num_classes), and with `mutable` the collections, unchanged.
    """
    outputs = jnp.zeros((len(images), self.network.num_classes), jnp.float32)
    stats = {name: tree for name, tree in variables.items() if name != 'params'}
    if train:
      token = self._compute(len(images))(variables['params'], jax.random.key_data(rngs['dropout']))
      outputs += token
      # They are sent when the pass has made them.
      stats = jax.tree.map(lambda s: s + token.astype(s.dtype), stats)
    if mutable is False:
      return outputs
    return outputs, {name: stats[name] for name in mutable}

  def _compute(self, images):
    """(params, words) -> 0.0 when the forward pass is over."""
    timer = _PassTimer(self, images)
    pieces = self.settings.pieces

    @jax.custom_vjp
    def compute(params, words):
      return forward(params, words)[0]

    def forward(params, words):
      # Some of each parameter: a divided one has to be gathered first.
      first = [leaf.ravel()[0] for leaf in jax.tree.leaves(params)]
      token = jax.pure_callback(timer.forward, _TOKEN, words, sum(first))
      return token, (params, words, token)

    def backward(residuals, cotangent):
      params, words, token = residuals
      token += 0 * cotangent
      tokens = []
      for index in range(pieces):
        wait = functools.partial(timer.backward, index)
        token = jax.pure_callback(wait, _TOKEN, words, _later(token))
        tokens.append(token)
      paths, tree = jax.tree_util.tree_flatten_with_path(params)
      paths = [tuple(key.key for key in path) for path, _ in paths]
      # A number that the compiler does not know: what it knew to be zero, it
      # might not send.
      gradients = [
        leaf * tokens[piece].astype(leaf.dtype)
        for piece, leaf in zip(self._piece_of(paths), jax.tree.leaves(params))
      ]
      return tree.unflatten(gradients), np.zeros(words.shape, jax.dtypes.float0)

    compute.defvjp(forward, backward)
    return compute

  def _piece_of(self, paths) -> list[int]:
    """The piece of the backward pass that gives each parameter's gradient."""
    place = {path: i for i, path in enumerate(reversed(self._order))}
    places = [place.get(path, i) for i, path in enumerate(paths)]
    pieces = self.settings.pieces
    return [-(-(i + 1) * pieces // len(paths)) - 1 for i in places]


class _PassTimer:
  """Sleeps until the parts of a pass would be over.

  They are timed from its start, so that what delays one part, on a machine of
  few cores, does not delay the others.
  """

  def __init__(self, emulated, images):
    self._emulated, self._images = emulated, images
    self._passes = {}  # start and seconds, by the words of the draw

  def forward(self, words, _):
    """Begins a pass, and sleeps for its forward part."""
    key = _key(words)
    seconds = emulation.pass_seconds(self._emulated.settings, self._images, key)
    self._passes[key] = self._emulated.clock(), seconds
    return self._wait(key, _FORWARD)

  def backward(self, index, words, _):
    """Sleeps until a piece of the gradients would be there."""
    key = _key(words)
    share = (index + 1) / self._emulated.settings.pieces
    token = self._wait(key, _FORWARD + (1 - _FORWARD) * share)
    if share == 1:
      del self._passes[key]
    return token

  def _wait(self, key, share):
    emulation.pace_sockets()
    start, seconds = self._passes[key]
    end = start + share * seconds
    self._emulated.sleep(max(0.0, end - self._emulated.clock()))
    return np.float32(0)


def _key(words):
  return tuple(map(int, np.asarray(words)))


def _later(token):
  """The token, a few operations later.

  XLA's executor on a CPU takes what is ready from a queue, in one thread unless
  there is much: so a sum of the gradients of one piece begins before the sleep
  for the next, which ends when it would have ended without that sum. What is
  made of a token directly is ready two operations after it.
  """
  return lax.sort(jnp.stack([token, token + 1]))[0]


def _pieces(megabytes):
  """Parameters of so many bytes, in equal arrays."""
  size = round(megabytes * 10**6) // 4
  return {
    f'piece{i:02}': {'kernel': jnp.zeros(((size + i) // _ARRAYS,), jnp.float32)}
    for i in range(_ARRAYS)
  }
