"""Calls of oneDNN in programs that XLA compiles, without a compiler.

XLA's foreign-function interface takes any C function; this one is Python's, by
ctypes: it reads the call frame, whose layout is in xla/ffi/api/c_api.h under
`jax.ffi.include_dir()`, and starts the operation that the call names. While
oneDNN computes, Python's lock is free.
"""

import ctypes
import functools
import sys
from typing import Any

import jax

from anp_jax.system.onednn import library, operations, pieces, specs, thread_pool

# Places in the structures of c_api.h, bytes.
_FRAME_EXTENSION, _FRAME_API, _FRAME_STAGE = 8, 16, 32
_FRAME_ARGUMENTS, _FRAME_ARGUMENTS_SIZE = 72, 56
_FRAME_RESULTS, _FRAME_RESULTS_SIZE = 112, 96
_FRAME_ATTRIBUTES = 160
_BUFFER_DATA = 24
_EXTENSION_METADATA = 24
_METADATA_VERSION, _API_VERSION = 24, 32  # two ints: major, minor
_API_ERROR_CREATE = 48
_EXECUTE, _INTERNAL_ERROR = 3, 13
_SWITCH_SECONDS = 2e-4


class _ErrorArguments(ctypes.Structure):
  """XLA_FFI_Error_Create_Args."""

  _fields_ = [
    ('struct_size', ctypes.c_size_t),
    ('extension', ctypes.c_void_p),
    ('message', ctypes.c_char_p),
    ('code', ctypes.c_int),
  ]


_CREATE_ERROR = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))


def call(spec: specs.Spec, results: Any, *arguments: jax.Array, into: int | None) -> Any:
  """Computes an operation in a traced program; see `onednn.call`."""
  _register()
  compute = jax.ffi.ffi_call(
    specs.TARGET,
    results,
    vmap_method='sequential',
    input_output_aliases=None if into is None else {into: 0},
  )
  return compute(*arguments, operation=specs.name(spec))


@functools.cache
def _register():
  # A call waits for Python's lock, and a thread that is busy in Python keeps it
  # for this long (by default 5 ms: 20 convolutions took 24 ms, not 5).
  sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
  capsule = jax.ffi.pycapsule(ctypes.cast(_handler, ctypes.c_void_p))
  jax.ffi.register_ffi_target(specs.TARGET, capsule, platform='cpu')


_operations: dict[tuple[bytes, int], pieces.Operation] = {}


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def _handler(frame):
  try:
    extension = _pointer(frame + _FRAME_EXTENSION)
    if extension:
      _answer_version(frame, extension)
    elif _integer(frame + _FRAME_STAGE).value == _EXECUTE:
      _execute(frame)
  except BaseException as e:  # noqa: BLE001 - nothing may pass into C++
    return _error(frame, f'{specs.TARGET}: {type(e).__name__}: {e}')
  return None


def _execute(frame):
  attribute = _pointer(_pointer(frame + _FRAME_ATTRIBUTES))
  text = ctypes.string_at(
    _pointer(attribute), _size(attribute + ctypes.sizeof(ctypes.c_void_p)).value
  )
  opened = library.opened()
  key = text, opened.threads  # bits depend on the number of threads
  thread_pool.prepare_thread()
  operation = _operations.get(key)
  if operation is None:
    operation = _operations[key] = operations.create(opened.api, text.decode(), opened.threads)
  addresses = [
    *_buffers(frame + _FRAME_ARGUMENTS, frame + _FRAME_ARGUMENTS_SIZE),
    *_buffers(frame + _FRAME_RESULTS, frame + _FRAME_RESULTS_SIZE),
  ]
  pool = thread_pool.Pool(frame, _pointer(frame + _FRAME_API))
  thread_pool.run(operation, addresses, pool)


def _buffers(place, size_place):
  """The addresses of the data of a frame's arguments or results."""
  array, pointer_bytes = _pointer(place), ctypes.sizeof(ctypes.c_void_p)
  for i in range(_size(size_place).value):
    yield _pointer(_pointer(array + i * pointer_bytes) + _BUFFER_DATA)


def _answer_version(frame, extension):
  """Tells XLA that this function speaks its version of the interface.

  What is read of a frame here has had its place since version 0.1, and XLA
  only adds fields to the end while the major version stays.
  """
  api = _pointer(frame + _FRAME_API)
  metadata = _pointer(extension + _EXTENSION_METADATA)
  for i in (0, ctypes.sizeof(ctypes.c_int)):
    _integer(metadata + _METADATA_VERSION + i).value = _integer(api + _API_VERSION + i).value


def _error(frame, message):
  api = _pointer(frame + _FRAME_API)
  create = _CREATE_ERROR(_pointer(api + _API_ERROR_CREATE))
  arguments = _ErrorArguments(
    ctypes.sizeof(_ErrorArguments), None, message.encode(), _INTERNAL_ERROR
  )
  return create(ctypes.byref(arguments))


_pointer = thread_pool.pointer
_integer = ctypes.c_int.from_address
_size = ctypes.c_size_t.from_address
