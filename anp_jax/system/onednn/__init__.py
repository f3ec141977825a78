"""oneDNN: convolutions, batch norm and mean pools on CPUs, called from XLA's programs.

XLA's CPU backend computes convolutions in bfloat16 no faster than in float32,
and their gradients slower than PyTorch, which uses oneDNN. So does this package,
through oneDNN's public C interface, without a compiler or private names of JAX.
Other folders import this module only.

| module | what it does |
|---|---|
| library | finds the shared library, checks it, opens it |
| c_api | names of oneDNN's C interface, as ctypes takes them |
| specs | says what an operation is, and names it in a compiled program |
| operations | convolutions, norms and mean pools, one for each shape |
| custom_call | lets XLA's programs call them |
"""

import math
from typing import TYPE_CHECKING, Any

from anp_jax.system.onednn import c_api, operations, specs
from anp_jax.system.onednn.library import VARIABLE, find, missing_reason, opened
from anp_jax.system.onednn.specs import (
  TARGET,
  BatchNormSpec,
  ConvolutionSpec,
  MeanPoolSpec,
  convolution_of,
  parse,
)

if TYPE_CHECKING:
  import jax

PLATFORM = 'cpu_onednn'  # a CPU for which `find` gives a library
_FEW_PIXELS = 4


def takes(spec: specs.Spec) -> bool:
  """Returns whether the open library computes an operation, and faster than XLA."""
  library = opened()
  if spec.dtype not in library.dtypes or _is_faster_by_xla(spec, library):
    return False
  try:
    operations.create(library.api, specs.name(spec), library.threads)
  except c_api.OneDnnError:
    return False
  return True


def call(spec: specs.Spec, results: Any, *arguments: 'jax.Array', into: int | None = None) -> Any:
  """Computes an operation in a traced program.

  Args:
    spec: operation that `takes` accepts.
    results: jax.ShapeDtypeStruct, or a tuple of them.
    *arguments: arrays in the operation's order, without the results; further ones are
      not read, and XLA computes them before the call.
    into: index of the argument whose memory receives the result.

  Returns:
    Array, or list of arrays.
  """
  from anp_jax.system.onednn import custom_call  # imports JAX, which a bad config need not

  return custom_call.call(spec, results, *arguments, into=into)


def mask_bytes(spec: BatchNormSpec) -> int:
  """Returns the bytes per group that a norm's ReLU keeps for its gradient."""
  library = opened()
  operation = operations.create(library.api, specs.name(spec), library.threads)
  assert isinstance(operation, operations.BatchNorm)
  return operation.mask_bytes


def _is_faster_by_xla(spec, library):
  if spec.dtype != 'float32':
    return False
  # With AVX2, a ResNet-50's step with oneDNN's norms and 1x1 kernels took 1.3 times as
  # long as by XLA, without them 1.0; LeNet's 0.7.
  if isinstance(spec, BatchNormSpec):
    # Groups that cannot be divided among the threads: a step of ResNet-50 with
    # one group took 1.2 times as long by OpenMP's threads. With two groups one
    # of ResNet-18 took 0.82 times as long by oneDNN as by XLA.
    return not library.is_wide or spec.shape[0] % library.threads != 0
  if isinstance(spec, ConvolutionSpec) and spec.groups == 1:
    # The kernel is larger than maps of few pixels, and XLA then computes by
    # patches (3x3, 512 channels, 32 maps of 2x2: 1.8 against 2.6 ms, its
    # gradients 1.7 and 2.0 against 3.1 and 2.9).
    is_product = spec.kernel[:2] == (1, 1) and not library.is_wide
    return is_product or math.prod(spec.result[1:3]) <= _FEW_PIXELS
  return False
