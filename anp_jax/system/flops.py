"""Operations of a program's matrix products and convolutions, from StableHLO.

JAX counts them for the CPU only: `jax.stages.Lowered.cost_analysis` is None for
a device behind a plugin, and so it is for one that is not here.
"""

import collections
import math
import re

_FUNCTION = re.compile(r'\s*func\.func (?:\w+ )?@([\w.$-]+)')
_CALL = re.compile(r'\bcall @([\w.$-]+)\(')
_TYPES = re.compile(r' : \(tensor<(.*)>, tensor<(.*)>\) -> tensor<(.*)>')
_LABELS = re.compile(r'dim_numbers = \[(.*?)\]x\[(.*?)\]->\[(.*?)\]')
_CONTRACTED = re.compile(r'contracting_dims = \[([\d, ]*)\] x')


def count(text: str) -> int:
  """Multiplications and additions of one device.

  What a function does counts as often as it is called; a loop's body counts
  once. Products with what padding or dilation puts in are not counted.

  Args:
    text: of `jax.stages.Lowered.as_text`.
  """
  own, calls, function = collections.Counter(), {}, ''
  for line in text.splitlines():
    if match := _FUNCTION.match(line):
      function = match[1]
      calls[function] = []
    elif match := _CALL.search(line):
      calls[function].append(match[1])
    elif 'stablehlo.convolution' in line:
      own[function] += _convolution(line)
    elif 'stablehlo.dot_general' in line:
      own[function] += _product(line)
  totals = {}

  def total(name):
    if name not in totals:
      totals[name] = own[name] + sum(total(c) for c in calls[name])
    return totals[name]

  return total('main') if calls else 0


def _product(line):
  left, _, result = _shapes(line)
  contracted = _numbers(_CONTRACTED.search(line)[1])
  return 2 * math.prod(result) * math.prod(left[i] for i in contracted)


def _convolution(line):
  shapes = _shapes(line)
  labels = [part.split(', ') for part in _LABELS.search(line).groups()]
  image, kernel, result = (
    dict(zip(names, shape)) for names, shape in zip(labels, shapes)
  )
  spatial = [name for name in result if name.isdigit()]
  window = {
    key: _numbers(found[1])
    for key in ('stride', 'pad', 'lhs_dilate', 'rhs_dilate')
    if (found := re.search(rf'\b{key} = \[([\d\[\], -]*?)\](?:, [a-z]|\}})',
                           line))
  }  # fmt: skip
  terms = 1
  for i, name in enumerate(sorted(spatial, key=int)):
    one = {key: numbers[i] for key, numbers in window.items() if key != 'pad'}
    terms *= _terms(
      image[name], kernel[name], result[name],
      window.get('pad', [0] * 2 * len(spatial))[2 * i], **one,
    )  # fmt: skip
  return 2 * terms * result['b'] * result['f'] * kernel['i']


def _terms(size, taps, outputs, before, stride=1, lhs_dilate=1, rhs_dilate=1):
  """How often, along an axis, a kernel's taps meet elements of an image."""
  last = (size - 1) * lhs_dilate
  places = (
    out * stride + tap * rhs_dilate - before
    for out in range(outputs)
    for tap in range(taps)
  )
  return sum(0 <= p <= last and p % lhs_dilate == 0 for p in places)


def _shapes(line):
  return [
    [int(n) for n in tensor.split('x')[:-1]]
    for tensor in _TYPES.search(line).groups()
  ]


def _numbers(text):
  return [int(n) for n in re.findall(r'-?\d+', text)]
