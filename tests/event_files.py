"""TensorBoard's event files, read as TensorBoard reads them."""


def read(folder):
  """The events of all files in the order of their names, checksums checked."""
  # Here, because it takes half as long as all other imports of all tests.
  from tensorflow.core.util import event_pb2
  from tensorflow.python.lib.io import tf_record

  paths = sorted(p for p in folder.iterdir() if p.is_file())
  records = (record for path in paths for record in tf_record.tf_record_iterator(str(path)))
  return [event_pb2.Event.FromString(record) for record in records]


def points(folder):
  """(tag, step) to all values that are shown.

  A restart takes back all steps from its own on.
  """
  points = {}
  for event in read(folder):
    if event.HasField('session_log'):
      points = {k: v for k, v in points.items() if k[1] < event.step}
    for value in event.summary.value:
      points.setdefault((value.tag, event.step), []).append(value.simple_value)
  return points
