"""Operations of a program's matrix products and convolutions, from its jaxpr.

JAX counts them for the CPU only: `jax.stages.Lowered.cost_analysis` is None for
a device behind a plugin, and so it is for one that is not here.
"""

from collections.abc import Callable, Iterable
import math
from typing import Any

import jax
from jax.extend import core

from anp_jax.system import onednn


def count_call(
  function: Callable, *arguments: Any, branches: Callable[[Iterable], int] = max
) -> int:
  """Counts the operations of a call, which is traced and not executed.

  The count follows the network's lowering. That for a CPU with oneDNN has a network's own
  products alone; accelerators pad the kernel of a stem, and a CPU without oneDNN computes
  grouped convolutions by element or as dense ones.

  Args:
    function: function of arrays; if jitted, its trace is cached for its lowering.
    *arguments: pytrees of arrays or jax.ShapeDtypeStruct.
    branches: reduction over the branches of a conditional; see `count`.
  """
  return count(jax.make_jaxpr(function)(*arguments), branches)


def count(jaxpr: core.ClosedJaxpr | core.Jaxpr, branches: Callable[[Iterable], int] = max) -> int:
  """Counts the multiplications and additions of products and convolutions.

  Shapes within jax.shard_map are those of one device, and so is the count. The
  body of a scan counts as often as it runs, that of a while loop once. Results
  that nothing uses are not counted, nor are products with what padding or
  dilation puts in.

  Args:
    jaxpr: jaxpr of a program.
    branches: reduction of the counts of a conditional's branches: `max` counts the
      largest, `sum` the total of devices that each take another branch.
  """
  if isinstance(jaxpr, core.ClosedJaxpr):
    jaxpr = jaxpr.jaxpr
  return _count(jaxpr, [True] * len(jaxpr.outvars), branches)


def _count(jaxpr, is_used, branches):
  """Counts what the results that are used need."""
  used = {v for v, flag in zip(jaxpr.outvars, is_used) if flag and isinstance(v, core.Var)}
  total = 0
  for equation in reversed(jaxpr.eqns):
    flags = [v in used for v in equation.outvars]
    if any(flags) or _has_effect(equation):
      used.update(v for v in equation.invars if isinstance(v, core.Var))
      total += _operations(equation, flags, branches)
  return total


def _operations(equation, is_used, branches):
  name, params = equation.primitive.name, equation.params
  if name == 'dot_general':
    return _product(equation)
  if name == 'conv_general_dilated':
    return _convolution(equation)
  if name == 'ffi_call':
    return _custom_call(params)
  counts = []
  for jaxpr in _inner(params):
    # Results of a loop's body are those of the loop, and what it carries.
    has_same_results = name not in ('scan', 'while') and (len(jaxpr.outvars) == len(is_used))
    flags = is_used if has_same_results else [True] * len(jaxpr.outvars)
    counts.append(_count(jaxpr, flags, branches))
  if name == 'cond':
    return branches(counts)
  return sum(counts) * (params['length'] if name == 'scan' else 1)


def _has_effect(equation):
  """Whether an equation does more than give results; collectives do not."""
  return any(type(effect).__name__ != 'NamedAxisEffect' for effect in equation.effects)


def _inner(params):
  """The jaxprs among the parameters of an equation."""
  for value in params.values():
    for item in value if isinstance(value, tuple | list) else (value,):
      if isinstance(item, core.ClosedJaxpr):
        yield item.jaxpr
      elif isinstance(item, core.Jaxpr):
        yield item


def _product(equation):
  (contracted, _), _ = equation.params['dimension_numbers']
  left, (result,) = equation.invars[0].aval.shape, equation.outvars
  return 2 * math.prod(result.aval.shape) * math.prod(left[i] for i in contracted)


def _convolution(equation):
  params = equation.params
  image, kernel = (v.aval.shape for v in equation.invars)
  result = equation.outvars[0].aval.shape
  image_axes, kernel_axes, result_axes = params['dimension_numbers']
  # The first two are the batch (a kernel's: its results) and the channels.
  meetings = math.prod(
    _meetings(
      image[image_axes[i + 2]],
      kernel[kernel_axes[i + 2]],
      result[result_axes[i + 2]],
      params['padding'][i][0],
      stride,
      (params['lhs_dilation'][i], params['rhs_dilation'][i]),
    )
    for i, stride in enumerate(params['window_strides'])
  )
  batch, features = (result[i] for i in result_axes[:2])
  # A kernel's channels are those of one group.
  return 2 * meetings * batch * features * kernel[kernel_axes[1]]


def _custom_call(params):
  """Those of a convolution by oneDNN; its gradients have as many."""
  operation = dict(params['attributes']).get('operation')
  if params['target_name'] != onednn.TARGET or operation is None:
    return 0
  spec = onednn.parse(operation)
  if not isinstance(spec, onednn.ConvolutionSpec):
    return 0
  meetings = math.prod(
    _meetings(
      spec.image[i + 1], spec.kernel[i], spec.result[i + 1], spec.pads[2 * i], spec.stride, (1, 1)
    )
    for i in range(2)
  )
  return 2 * meetings * spec.result[0] * math.prod(spec.kernel[2:])


def _meetings(size, taps, outputs, before, stride, dilation):
  """How often, along an axis, a kernel's taps meet elements of an image."""
  image_dilation, kernel_dilation = dilation
  last = (size - 1) * image_dilation
  places = (
    out * stride + tap * kernel_dilation - before for out in range(outputs) for tap in range(taps)
  )
  return sum(0 <= p <= last and p % image_dilation == 0 for p in places)
