"""Convolutions of which helpers compute some: devices that are in no mesh.

The program runs on one device. Where a convolution begins it hands its input
and each helper's features of the kernel out, computes its own, and waits for
theirs: host callbacks, so that a helper may be of any platform and host.
Nothing else is computed twice, as it is where the devices of a mesh split.
"""

from collections.abc import Callable
import functools
import itertools

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import sync
from anp_jax.parallel.channel_split import convolutions
from anp_jax.parallel.channel_split import plan as plan_lib
from anp_jax.runtimes.offload import device as helper_lib

_numbers = itertools.count()


class Helped(sync.Sync):
  """One device's training, whose convolutions are computed with helpers."""

  def __init__(self, config, specs, order, helpers):
    """Takes the helpers as well, in the order of the plan's counts."""
    super().__init__(config, specs, order)
    self._plan = plan_lib.of(config)
    self._helpers = tuple(helpers)
    self._seen = set()
    self._uses = {}  # of a kernel, by path: those of the trace under way

  def reduce(self, gradients, others):
    """As `Sync`, with the gradients that helpers have of the kernels.

    They are waited for here, all at once, rather than where they are begun:
    nothing needs them before.
    """
    plan_lib.check_layers(self._plan, self._seen)
    paths, tree = jax.tree_util.tree_flatten_with_path(gradients)
    found = [x for _, x in paths]
    places, uses = [], []
    for i, (path, _) in enumerate(paths):
      own = self._uses.pop(mesh_lib.path_name(path), [])
      own = [use for use in own if use.is_learned]
      if own:
        places.append(i)
        uses.append(own)
    if places:
      parts = _kernels(uses, [found[i] for i in places])
      for i, part in zip(places, parts, strict=True):
        before = found[i].shape[-1] - part.shape[-1]
        found[i] += jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(before, 0)])
    return super().reduce(tree.unflatten(found), others)

  def convolutions(self):
    """In this context, a model that is applied has its convolutions split."""
    return convolutions.computed_by(self._convolve)

  def _convolve(self, layer, convolve, x, kernel):
    self._seen.add(layer)
    features = kernel.shape[-1]
    counts = self._plan.counts(layer, features, 1 + len(self._helpers))
    if counts is None or counts[0] == features:
      return convolve(x, kernel)
    use = Use(convolve, x, kernel, counts, self._helpers)
    self._uses.setdefault(f'{layer}/kernel', []).append(use)
    return _split(x, kernel, use)


def task(convolve: Callable, x, kernel, y, count: int) -> helper_lib.Task:
  """What a helper is to compute so many features of.

  Args:
    convolve: as for `Use`.
    x: array or its shape.
    kernel: likewise, of all features.
    y: likewise, of all features.
    count: of the helper's features.
  """

  def narrowed(like):
    return jax.ShapeDtypeStruct((*like.shape[:-1], count), like.dtype)

  return helper_lib.Task(
    number=next(_numbers),
    convolve=convolve,
    x=jax.ShapeDtypeStruct(x.shape, x.dtype),
    kernel=narrowed(kernel),
    y=narrowed(y),
  )


class Use:
  """A convolution of a program that is traced, and its calls when it runs.

  What has begun at a helper is kept here until the program asks for it, in the
  order of its data: what waits has a number, `token`, which the call that
  fetches it is given.

  Attributes:
    convolve: (x, kernel) -> y.
    own: the features of the device that trains, which are the first.
    dtype: of the kernel.
    is_learned: whether the program has its backward pass.
  """

  def __init__(self, convolve: Callable, x, kernel, counts, helpers):
    """Divides a convolution.

    Args:
      convolve: (x, kernel, platform=None) -> (..., features), each feature of
        its own part of the kernel alone; platform: what it is lowered for,
        where that is not the program's.
      x: (batch, height, width, channels).
      kernel: (height, width, channels, features).
      counts: features of this device, then of each helper; 0 or more.
      helpers: `helper.Helper`, or what has its face.

    Raises:
      ValueError: if the counts are not of as many devices or features.
    """
    if len(counts) != 1 + len(helpers) or sum(counts) != kernel.shape[-1]:
      raise ValueError(
        f'counts {tuple(counts)}: expected {1 + len(helpers)} of them, '
        f'{kernel.shape[-1]} in all'
      )
    self.convolve, self.own = convolve, slice(0, counts[0])
    self.dtype, self.is_learned = kernel.dtype, False
    y = jax.eval_shape(convolve, x, kernel)
    self._parts = []  # (helper, its features, task)
    end = counts[0]
    for count, helper in zip(counts[1:], helpers, strict=True):
      cut = slice(end, end := end + count)
      if count:
        one = task(convolve, x, kernel, y, count)
        self._parts.append((helper, cut, one))
    self._begun = {}  # token to futures
    self._tokens = itertools.count(1)
    self._kernels = []  # futures of gradients that nobody fetched yet

  # Within the program.

  def begin(self, x, kernel, keep: bool):
    """Hands out the forward pass; gives its token."""
    begin = functools.partial(self._begin, keep=keep)
    return jax.pure_callback(begin, _TOKEN, x, kernel)

  def begin_back(self, token, dy, of_x: bool):
    """Hands out the backward pass; gives its token and a zero.

    Of what is made with the zero XLA cannot know that it does not need it.
    """
    self.is_learned = True
    begin = functools.partial(self._begin_back, of_x=of_x)
    zero = jax.ShapeDtypeStruct((), self.dtype)
    return jax.pure_callback(begin, (_TOKEN, zero), token, dy)

  def results(self, name: str, token, own) -> tuple:
    """The helpers' 'y', or their parts of 'x', when this device has its own.

    Args:
      name: of the two.
      token: of what was begun.
      own: array of this device's part; None: it has none.
    """
    likes = tuple(getattr(task, name) for _, _, task in self._parts)
    # A number of the own part: without it, XLA might wait before it computes.
    after = [] if own is None else [own[(0,) * own.ndim]]
    return jax.pure_callback(self._results, likes, token, *after)

  # Called by the program, on a thread of its own.

  def kernel(self) -> np.ndarray:
    """The gradient of the helpers' features since the last call, summed.

    In float32 at least: what a device computes itself is added so.
    Zero where there was none: of a loop's body, traced twice, one is run.
    """
    begun, self._kernels = self._kernels, []
    wide = jnp.promote_types(self.dtype, jnp.float32)
    if not begun:
      return np.zeros((), wide)
    sums = [
      sum(f.result().astype(wide, copy=False) for f in futures)
      for futures in zip(*begun)
    ]
    return np.concatenate(sums, -1)

  def _begin(self, x, kernel, keep):
    # Copies: their memory is the program's, which goes on.
    x = np.array(x)
    kernel = np.asarray(kernel)
    return self._token(
      [
        helper.forward(task, x, np.array(kernel[..., cut]), keep)
        for helper, cut, task in self._parts
      ]
    )

  def _begin_back(self, token, dy, of_x):
    del token  # the forward pass has been fetched
    dy = np.asarray(dy)
    pairs = [
      helper.backward(task, np.array(dy[..., cut]), of_x)
      for helper, cut, task in self._parts
    ]
    self._kernels.append([dkernel for _, dkernel in pairs])
    return self._token([dx for dx, _ in pairs]), np.zeros((), self.dtype)

  def _results(self, token, *after):
    del after
    return tuple(future.result() for future in self._begun.pop(int(token)))

  def _token(self, begun):
    token = next(self._tokens)
    if begun[0] is not None:
      self._begun[token] = begun
    return np.int32(token)


_TOKEN = jax.ShapeDtypeStruct((), np.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _split(x, kernel, use):
  return _forward(x, kernel, use, keep=False)[0]


def _split_forward(x, kernel, use):
  # Perturbed: a gradient is asked for, which of images none is.
  y, token = _forward(x.value, kernel.value, use, keep=True)
  return y, (x.value, kernel.value, token, _Static(x.perturbed))


def _split_backward(use, saved, dy):
  """Gradients; that of the kernel has zeros where helpers have theirs."""
  x, kernel, token, of_x = saved
  if isinstance(dy, SymbolicZero):
    dy = jnp.zeros(dy.shape, dy.dtype)
  token, zero = use.begin_back(token, dy, of_x.value)
  # Handed out before the own part begins.
  x, kernel, dy, token = lax.optimization_barrier((x, kernel, dy, token))
  own = use.own
  dx, parts, dkernel = None, (), []
  if own.stop and of_x.value:
    pull = jax.vjp(lambda x: use.convolve(x, kernel[..., own]), x)[1]
    dx = pull(dy[..., own])[0]
  if of_x.value:
    parts = use.results('x', token, dx)
    dx = sum(parts, start=0 if dx is None else dx)
  if own.stop:
    pull = jax.vjp(lambda w: use.convolve(x, w), kernel[..., own])[1]
    dkernel = [pull(dy[..., own])[0]]
  # What waits for the helpers' gradients must not run before they have begun.
  zeros = jnp.broadcast_to(
    zero, (*kernel.shape[:-1], kernel.shape[-1] - own.stop)
  )
  if dx is None:
    dx = jnp.zeros_like(x)
  return dx, jnp.concatenate([*dkernel, zeros], -1)


_split.defvjp(_split_forward, _split_backward, symbolic_zeros=True)


def _forward(x, kernel, use, keep):
  """y, and the token of what helpers keep of it."""
  token = use.begin(x, kernel, keep)
  x, kernel, token = lax.optimization_barrier((x, kernel, token))
  y = None
  if use.own.stop:
    y = use.convolve(x, kernel[..., use.own])
  parts = use.results('y', token, y)
  return jnp.concatenate([*([] if y is None else [y]), *parts], -1), token


def _kernels(uses, gradients):
  """The helpers' parts of kernels' gradients, once these have their own.

  Args:
    uses: those of each kernel.
    gradients: of each kernel, so far.

  Returns:
    Of each kernel, in its gradient's dtype.
  """
  likes = tuple(
    jax.ShapeDtypeStruct(
      (*g.shape[:-1], g.shape[-1] - own[0].own.stop), g.dtype
    )
    for own, g in zip(uses, gradients, strict=True)
  )

  def fetch(*after):
    del after
    sums = [sum(use.kernel() for use in own) for own in uses]
    return tuple(
      np.broadcast_to(total, like.shape).astype(like.dtype, copy=False)
      for total, like in zip(sums, likes, strict=True)
    )

  return jax.pure_callback(fetch, likes, *[g[..., -1, -1] for g in gradients])


@jax.tree_util.register_static
class _Static:
  """A value that is known when the program is traced."""

  def __init__(self, value):
    self.value = value

  def __eq__(self, other):
    return isinstance(other, _Static) and self.value == other.value

  def __hash__(self):
    return hash(self.value)
