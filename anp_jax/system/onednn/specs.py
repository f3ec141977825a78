"""The operations of oneDNN: shapes, dtypes, settings.

A compiled program names an operation by a text. So programs can be cached on disk,
and a cached program creates its operations again.
"""

import ast
from typing import Any, NamedTuple

# XLA's name for a call of any of these.
TARGET = 'anp_onednn'
Pads = tuple[tuple[int, int], tuple[int, int]]


class ConvolutionSpec(NamedTuple):
  """A convolution's shapes.

  Attributes:
    direction: 'forward', 'backward_data' or 'backward_weights'.
    dtype: dtype of all arrays; float32 or bfloat16. Sums are in float32.
    image: (batch, height, width, channels).
    kernel: (height, width, channels of a group, features).
    result: (batch, height', width', features).
    stride: stride in pixels along both axes.
    pads: (top, bottom, left, right), none below zero.
    groups: channel groups, each convolved with its share of the features.
    after: steps after a forward pass, some of 'norm', 'add', 'relu' in this order:
      a float32 factor and summand per feature, with a float32 kernel; the sum with
      the content of the result's memory; a ReLU, which maps NaN to 0. The result is
      rounded once, at the end.
  """

  direction: str
  dtype: str
  image: tuple[int, ...]
  kernel: tuple[int, ...]
  result: tuple[int, ...]
  stride: int
  pads: tuple[int, ...]
  groups: int = 1
  after: tuple[str, ...] = ()


def convolution_of(
  direction: str, x: Any, kernel: Any, stride: int, pads: Pads, groups: int
) -> ConvolutionSpec:
  """Returns the spec of a convolution.

  Args:
    direction: 'forward', 'backward_data' or 'backward_weights'.
    x: array or shape and dtype, (batch, height, width, channels).
    kernel: (height, width, channels of a group, features).
    stride: stride in pixels along both axes.
    pads: padding of x, ((top, bottom), (left, right)).
    groups: number of channel groups.
  """
  size = (
    (n + sum(pad) - k) // stride + 1 for n, k, pad in zip(x.shape[1:3], kernel.shape[:2], pads)
  )
  return ConvolutionSpec(
    direction,
    x.dtype.name,
    tuple(x.shape),
    tuple(kernel.shape),
    (x.shape[0], *size, kernel.shape[-1]),
    stride,
    (*pads[0], *pads[1]),
    groups,
  )


class BatchNormSpec(NamedTuple):
  """A batch norm of groups, with or without the ReLU after it.

  Attributes:
    direction: 'forward' or 'backward'.
    dtype: dtype of x and y; float32 or bfloat16. All else is float32.
    shape: (groups, rows, channels); each group has its own statistics.
    epsilon: constant added to the variance.
    relu: whether a ReLU follows.
  """

  direction: str
  dtype: str
  shape: tuple[int, int, int]
  epsilon: float
  relu: bool


class MeanPoolSpec(NamedTuple):
  """Means over windows of a map; padding counts as zeros.

  Attributes:
    direction: 'forward' or 'backward'.
    dtype: dtype of all arrays; float32 or bfloat16.
    image: (batch, height, width, channels).
    result: (batch, height', width', channels).
    window: side of the window in pixels.
    stride: stride in pixels along both axes.
    pads: (top, bottom, left, right).
  """

  direction: str
  dtype: str
  image: tuple[int, ...]
  result: tuple[int, ...]
  window: int
  stride: int
  pads: tuple[int, ...]


Spec = ConvolutionSpec | BatchNormSpec | MeanPoolSpec

_KINDS = {'convolution': ConvolutionSpec, 'norm': BatchNormSpec, 'mean_pool': MeanPoolSpec}


def name(spec: Spec) -> str:
  """Returns the text that names an operation in a compiled program."""
  (kind,) = (k for k, type_ in _KINDS.items() if type(spec) is type_)
  return f'{kind} {tuple(spec)!r}'


def parse(text: str) -> Spec:
  """Returns the spec of a text from `name`."""
  kind, _, fields = text.partition(' ')
  return _KINDS[kind](*ast.literal_eval(fields))
