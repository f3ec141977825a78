"""What oneDNN is asked to compute: shapes, dtypes, settings.

An operation is named by a text, which a compiled program carries: so programs
can be kept on disk, and one that is read from there makes its operations again.
"""

import ast
from typing import NamedTuple

# XLA's name for a call of any of these.
TARGET = 'anp_onednn'


class ConvolutionSpec(NamedTuple):
  """A convolution's shapes.

  Attributes:
    direction: 'forward', 'backward_data' or 'backward_weights'.
    dtype: of all arrays; float32 or bfloat16. Sums are in float32.
    image: (batch, height, width, channels).
    kernel: (height, width, channels of a group, features).
    result: (batch, height', width', features).
    stride: pixels, both ways.
    pads: (top, bottom, left, right), none below zero.
    groups: of channels, each convolved with its share of the features.
    waits: whether `run` gets one more address after the arguments', where it
      reads nothing: XLA makes such an argument before it runs the call.
    after: what follows a forward pass, of 'norm', 'add', 'relu', in this order:
      a factor and a summand of each feature in float32, and the kernel is
      float32, too; the sum with what the result's memory holds; a ReLU, which
      makes 0 of NaN. The result is rounded once, after all.
  """

  direction: str
  dtype: str
  image: tuple[int, ...]
  kernel: tuple[int, ...]
  result: tuple[int, ...]
  stride: int
  pads: tuple[int, ...]
  groups: int = 1
  waits: bool = False
  after: tuple[str, ...] = ()


def convolution_of(direction: str, x, kernel, stride: int, pads, groups: int) -> ConvolutionSpec:
  """Returns the spec of a convolution of arrays, or of shapes and dtypes.

  Args:
    direction: 'forward', 'backward_data' or 'backward_weights'.
    x: (batch, height, width, channels).
    kernel: (height, width, channels of a group, features).
    stride: pixels, both ways.
    pads: padding of x, ((top, bottom), (left, right)).
    groups: of channels.
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
    dtype: of x and y; float32 or bfloat16. All else is float32.
    shape: (groups, rows, channels); each group has statistics of its own.
    epsilon: added to the variance.
    relu: whether y is what a ReLU makes of it.
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
    dtype: of all arrays; float32 or bfloat16.
    image: (batch, height, width, channels).
    result: (batch, height', width', channels).
    window: pixels a side.
    stride: pixels, both ways.
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
  """Returns what `name` was given."""
  kind, _, fields = text.partition(' ')
  return _KINDS[kind](*ast.literal_eval(fields))
