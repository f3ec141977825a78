"""TensorFlow as an input library: quiet, and blind to accelerators."""

import functools
import os
import sys
import types


@functools.cache
def load() -> types.ModuleType:
  """Imports TensorFlow for readers, and returns the module."""
  # Its line about oneDNN escapes the log level, and decoding has no use for it.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
  # JAX has set a level by now; it and child processes keep that one.
  before = os.environ.get('TF_CPP_MIN_LOG_LEVEL')
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
  # It imports Keras where it can, for two fifths of its own time.
  hides_keras = 'keras' not in sys.modules
  if hides_keras:
    sys.modules['keras'] = None  # type: ignore[assignment]
  try:
    import tensorflow as tf

    # Makes the devices' list, and with it all the lines that there are.
    for kind in ('GPU', 'TPU'):
      tf.config.set_visible_devices([], kind)
  finally:
    if hides_keras:
      del sys.modules['keras']
    if before is None:
      del os.environ['TF_CPP_MIN_LOG_LEVEL']
    else:
      os.environ['TF_CPP_MIN_LOG_LEVEL'] = before
  return tf
