"""The part of oneDNN 3's C interface that this package uses, by ctypes.

Constants are those of oneDNN's public header dnnl_types.h. Objects of oneDNN are
never freed: they are cached by shape.
"""

from collections.abc import Sequence
import ctypes
import threading
from typing import Any

POINTER = ctypes.c_void_p
_INT, _SIZE = ctypes.c_int, ctypes.c_size_t
_DIMENSIONS = ctypes.c_int64 * 12

# dnnl_data_type_t, by NumPy's names.
DTYPES = {'float32': 3, 'bfloat16': 2}
_CPU, _IN_ORDER, _USER_SCRATCHPAD, _STRICT = 1, 1, 1, 0
FORWARD_TRAINING, FORWARD_INFERENCE, BACKWARD = 64, 96, 128  # dnnl_prop_kind_t
# dnnl_alg_kind_t: a convolution, a mean in which padding counts, a ReLU.
DIRECT, MEAN_WITH_PADDING, _RELU = 1, 0x2FF, 0x20
ANY_LAYOUT = 1  # dnnl_format_tag_t
SCALE, SHIFT, RELU = 2, 4, 8  # dnnl_normalization_flags_t
# dnnl_query_t.
_IMPLEMENTATION = 8
WEIGHTS, DIFF_WEIGHTS, WORKSPACE, _SCRATCHPAD = 131, 132, 135, 136
_DTYPE, _OFFSET = 258, 259
# Names of arguments, DNNL_ARG_*: what is read and written, a norm's vectors, gradients.
ARG_SRC, ARG_DST, ARG_WEIGHTS, ARG_BIAS = 1, 17, 33, 41
ARG_MEAN, ARG_VARIANCE, ARG_SCALE, ARG_SHIFT = 49, 50, 51, 52
ARG_WORKSPACE, _ARG_SCRATCHPAD = 64, 80
ARG_DIFF_SRC, ARG_DIFF_DST, ARG_DIFF_WEIGHTS = 129, 145, 161
ARG_DIFF_SCALE, ARG_DIFF_SHIFT = 255, 256
ARG_SOURCES = 1024  # and the number of one of a sum's arrays
ARG_FACTORS = 4097  # of what a copy reads


class OneDnnError(RuntimeError):
  """A failed call of oneDNN."""


class _Version(ctypes.Structure):
  _fields_ = [('major', _INT), ('minor', _INT), ('patch', _INT)]


class _Argument(ctypes.Structure):
  _fields_ = [('name', _INT), ('memory', POINTER)]


class Api:
  """An open library, with an engine for the CPU.

  Attributes:
    functions: ctypes.CDLL; its functions run without Python's lock.
    version: (major, minor, patch).
  """

  def __init__(self, path: str):
    """Opens a shared library.

    Raises:
      OSError: if it cannot be opened.
      OneDnnError: if it gives no engine here.
    """
    self.functions = ctypes.CDLL(path)
    # With Python's lock: what takes less time than giving the lock away.
    self._quick = ctypes.PyDLL(path)
    self._thread = threading.local()
    self.version = self._read_version()
    self._declare()
    self.engine = self.create('dnnl_engine_create', _INT(_CPU), _SIZE(0))
    self._attributes = self._make_attributes()

  def _make_attributes(self):
    attributes = self.create('dnnl_primitive_attr_create')
    for setting, value in (
      ('scratchpad_mode', _INT(_USER_SCRATCHPAD)),
      # Whatever ONEDNN_DEFAULT_FPMATH_MODE says: float32 stays float32.
      ('fpmath_mode', _INT(_STRICT)),
    ):
      self.call(f'dnnl_primitive_attr_set_{setting}', attributes, value)
    return attributes

  def _read_version(self):
    self.functions.dnnl_version.restype = ctypes.POINTER(_Version)
    version = self.functions.dnnl_version().contents
    return version.major, version.minor, version.patch

  def _declare(self):
    functions = self.functions
    functions.dnnl_primitive_desc_query_md.restype = POINTER
    functions.dnnl_memory_desc_get_size.restype = _SIZE
    functions.dnnl_cpu_isa2str.restype = ctypes.c_char_p
    functions.dnnl_data_type_size.restype = _SIZE
    functions.dnnl_primitive_execute.argtypes = [POINTER, POINTER, _INT, POINTER]
    self.set_data = self._quick.dnnl_memory_set_data_handle
    self.set_data.argtypes = [POINTER, POINTER]

  def call(self, function: str, *arguments: Any) -> None:
    """Calls a function that returns a dnnl_status_t.

    Raises:
      OneDnnError: if it is not dnnl_success.
    """
    status = getattr(self.functions, function)(*arguments)
    if status:
      raise OneDnnError(f'{function}: status {status}')

  def create(self, function: str, *arguments: Any) -> POINTER:
    """Calls a function whose first argument receives a new object."""
    result = POINTER()
    self.call(function, ctypes.byref(result), *arguments)
    return result

  def isa(self) -> str:
    """Returns the instruction set that oneDNN uses, such as AVX512_CORE."""
    number = self.functions.dnnl_get_effective_cpu_isa()
    text = self.functions.dnnl_cpu_isa2str(_INT(number)).decode()
    return text.removeprefix('cpu_isa_').upper()

  def stream(self) -> POINTER:
    """Creates an execution stream of the engine."""
    return self.create('dnnl_stream_create', self.engine, _INT(_IN_ORDER))

  def array(self, shape: Sequence[int], dtype: str, strides: Sequence[int] | None) -> POINTER:
    """Describes an array.

    Args:
      shape: shape in oneDNN's order of axes: batch, channels, height, width.
      dtype: 'float32' or 'bfloat16'.
      strides: elements, one an axis; None: oneDNN chooses the layout.
    """
    size, kind = _INT(len(shape)), _INT(DTYPES[dtype])
    if strides is None:
      return self.create(
        'dnnl_memory_desc_create_with_tag', size, dimensions(shape), kind, _INT(ANY_LAYOUT)
      )
    return self.create(
      'dnnl_memory_desc_create_with_strides', size, dimensions(shape), kind, dimensions(strides)
    )

  def size(self, array: POINTER | None) -> int:
    """Returns the bytes of an array; 0 without one."""
    return self.functions.dnnl_memory_desc_get_size(array)

  def equal(self, left: POINTER, right: POINTER) -> bool:
    """Returns whether two descriptions of arrays are the same."""
    return bool(self.functions.dnnl_memory_desc_equal(left, right))

  def describe(self, operation: str, *arguments: Any, after: Sequence[str] = ()) -> POINTER:
    """Describes a primitive, such as 'convolution_forward'.

    Args:
      operation: name of the operation.
      *arguments: arguments of the operation.
      after: steps before the result is written: 'add', which adds to the content of
        its memory, 'relu', or both, in this order.
    """
    attributes = self._attributes
    if after:
      attributes = self._make_attributes()
      steps = self.create('dnnl_post_ops_create')
      for step in after:
        if step == 'add':
          self.call('dnnl_post_ops_append_sum', steps, ctypes.c_float(1), _INT(0), _INT(0))
        else:
          self.call(
            'dnnl_post_ops_append_eltwise', steps, _INT(_RELU), ctypes.c_float(0), ctypes.c_float(0)
          )
      self.call('dnnl_primitive_attr_set_post_ops', attributes, steps)
    return self.create(
      f'dnnl_{operation}_primitive_desc_create', self.engine, *arguments, attributes
    )

  def describe_reorder(self, source: POINTER, target: POINTER, factors: bool = False) -> POINTER:
    """Describes the copy of an array into another layout, or dtype.

    Args:
      source: description of the array that is read.
      target: description of the array that is written.
      factors: whether elements are multiplied by ARG_FACTORS, one factor per index
        of the first axis.
    """
    attributes = self._attributes
    if factors:
      attributes = self._make_attributes()
      self.call('dnnl_primitive_attr_set_scales_mask', attributes, _INT(ARG_SRC), _INT(1))
    return self.create(
      'dnnl_reorder_primitive_desc_create', source, self.engine, target, self.engine, attributes
    )

  def describe_sum(self, sources: Sequence[POINTER], target: POINTER) -> POINTER:
    """Describes the sum of arrays of one shape, added in this order."""
    count = len(sources)
    return self.create(
      'dnnl_sum_primitive_desc_create',
      self.engine,
      target,
      _INT(count),
      (ctypes.c_float * count)(*[1] * count),
      (POINTER * count)(*sources),
      self._attributes,
    )

  def slice(
    self, array: POINTER, shape: Sequence[int], axis: int, start: int
  ) -> tuple[POINTER, int]:
    """Describes a slice of an array along one axis.

    Args:
      array: description of the array.
      shape: shape of the slice.
      axis: axis along which the slice starts at `start`; it starts at 0 in others.
      start: first index; a multiple of the layout's blocks.

    Returns:
      Description of such a slice at the start of the array, for primitives without
      offsets; and the offset of the slice in bytes.
    """
    first, later = (
      self.create(
        'dnnl_memory_desc_create_submemory',
        array,
        dimensions(shape),
        dimensions([place if i == axis else 0 for i in range(len(shape))]),
      )
      for place in (0, start)
    )
    offset, dtype = ctypes.c_int64(), _INT()
    for number, value in ((_OFFSET, offset), (_DTYPE, dtype)):
      self.call('dnnl_memory_desc_query', later, _INT(number), ctypes.byref(value))
    element = self.functions.dnnl_data_type_size(dtype)
    return first, offset.value * element

  def use_threads(self, count: int) -> None:
    """Sets the number of OpenMP threads for calls by the calling thread."""
    quick, counts = self._quick, self._thread.__dict__
    if counts.get('count') == count == quick.omp_get_max_threads():
      return
    # With dynamic numbers of threads it may give fewer than it was asked for,
    # and oneDNN would leave out what the others were to compute.
    quick.omp_set_dynamic(_INT(0))
    quick.omp_set_num_threads(_INT(count))
    counts['count'] = count

  def query(self, primitive: POINTER, what: int) -> POINTER:
    """Returns an array's description: WEIGHTS, DIFF_WEIGHTS or WORKSPACE."""
    return POINTER(self.functions.dnnl_primitive_desc_query_md(primitive, _INT(what), _INT(0)))

  def implementation(self, primitive: POINTER) -> str:
    """Returns oneDNN's name for how a primitive is computed."""
    name = ctypes.c_char_p()
    self.call(
      'dnnl_primitive_desc_query', primitive, _INT(_IMPLEMENTATION), _INT(0), ctypes.byref(name)
    )
    return (name.value or b'').decode()


class Primitive:
  """An operation of fixed shapes, which several threads may run at once.

  Attributes:
    scratch_bytes: temporary memory that a run needs.
    implementation: oneDNN's name for how it is computed.
  """

  def __init__(self, api: Api, description: POINTER, arguments: Sequence[tuple]):
    """Compiles a primitive.

    Args:
      api: C interface of the library.
      description: description from `Api.describe`.
      arguments: pairs (name of an argument, description of an array), in the order
        of `run`'s addresses.
    """
    self._api = api
    self._primitive = api.create('dnnl_primitive_create', description)
    scratch = api.query(description, _SCRATCHPAD)
    self._arguments = [*arguments, (_ARG_SCRATCHPAD, scratch)]
    self.scratch_bytes = api.size(scratch)
    self.implementation = api.implementation(description)
    # Sets of memory objects that no run uses. A list's pop and append are
    # atomic in Python.
    self._idle: list[tuple[list, ctypes.Array]] = []

  def run(self, stream: int, *addresses: int) -> None:
    """Computes the operation, and waits for its end.

    Args:
      stream: stream of the calling thread alone.
      *addresses: addresses of the arguments' data, and last of the scratch memory.

    Raises:
      OneDnnError: if oneDNN fails.
    """
    try:
      memories, arguments = self._idle.pop()
    except IndexError:
      memories, arguments = self._make_arguments()
    set_data = self._api.set_data
    for memory, address in zip(memories, addresses, strict=True):
      set_data(memory, address)
    status = self._api.functions.dnnl_primitive_execute(
      self._primitive, stream, len(memories), ctypes.addressof(arguments)
    )
    self._idle.append((memories, arguments))
    if status:
      raise OneDnnError(f'{self.implementation}: status {status}')

  def _make_arguments(self):
    memories = [
      self._api.create('dnnl_memory_create', array, self._api.engine, POINTER()).value
      for _, array in self._arguments
    ]
    names = [name for name, _ in self._arguments]
    arguments = (_Argument * len(names))(*zip(names, memories))
    return memories, arguments


def dimensions(values: Sequence[int]) -> ctypes.Array:
  """Returns a dnnl_dims_t."""
  return _DIMENSIONS(*values)
