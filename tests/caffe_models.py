"""CaffeNets: files as Caffe writes them, by protobuf, and logits by PyTorch."""

import numpy as np

NORM_FIRST = {'caffenet': False, 'bvlc_alexnet': True}
# (out, in / groups, height, width) or (out, in), as bvlc_reference_caffenet has them.
SHAPES = {
  'conv1': (96, 3, 11, 11),
  'conv2': (256, 48, 5, 5),
  'conv3': (384, 256, 3, 3),
  'conv4': (384, 192, 3, 3),
  'conv5': (256, 192, 3, 3),
  'fc6': (4096, 9216),
  'fc7': (4096, 4096),
  'fc8': (7, 4096),
}
# In 2014's enum V1LayerParameter.LayerType, and in the two other forms.
_TYPES = {
  'Convolution': (4, 'conv'),
  'InnerProduct': (14, 'innerproduct'),
  'LRN': (15, 'lrn'),
  'Pooling': (17, 'pool'),
}


def tensors(shapes=None):
  """Random {layer: (weight, bias)}: maps of the size of pixels, all else of order one."""
  random = np.random.default_rng(0)
  factors = {'fc6': 0.02, 'fc8': 0.5}
  result = {}
  for name, shape in (shapes or SHAPES).items():
    spread = np.float32(np.sqrt(2 / np.prod(shape[1:])) * factors.get(name, 1))
    weight = spread * random.standard_normal(shape, np.float32)
    result[name] = weight, random.standard_normal(shape[0], np.float32)
  return result


def logits(x, w, norm_first=False):
  """The network in PyTorch's functions.

  Args:
    x: (batch, 3, height, width) tensor.
    w: {layer: (weight, bias)} of tensors; the last layer is fc8 or head.
    norm_first: whether it is AlexNet.
  """
  import torch

  f = torch.nn.functional

  def pool(x):
    return f.max_pool2d(x, 3, 2, ceil_mode=True)

  def norm(x):
    return f.local_response_norm(x, 5, alpha=1e-4, beta=0.75, k=1)

  def reduced(x):
    return pool(norm(x)) if norm_first else norm(pool(x))

  x = reduced(f.relu(f.conv2d(x, *w['conv1'], stride=4)))
  x = reduced(f.relu(f.conv2d(x, *w['conv2'], padding=2, groups=2)))
  x = f.relu(f.conv2d(x, *w['conv3'], padding=1))
  x = f.relu(f.conv2d(x, *w['conv4'], padding=1, groups=2))
  x = pool(f.relu(f.conv2d(x, *w['conv5'], padding=1, groups=2))).flatten(1)
  for name in ('fc6', 'fc7'):
    x = f.relu(f.linear(x, *w[name]))
  return f.linear(x, *w['fc8' if 'fc8' in w else 'head'])


def net(arrays, form='layer', order=('Pooling', 'LRN'), packed='floats', dtype='f4', last='fc8'):
  """The bytes of a NetParameter.

  Args:
    arrays: {layer: (weight, bias)}, in the order of the file.
    form: 'layer', 'V1' of 2014 or 'V0' before it, which have blobs of four axes.
    order: types of the two layers after the first.
    packed: 'floats'; 'bytes', which is the same on the wire and quick; '': a field a number.
    dtype: 'f4' or 'f8'.
    last: name of the last layer.
  """
  message = _net_parameter(packed)(name='CaffeNet')
  layers = [
    (name, 'Convolution' if w.ndim == 4 else 'InnerProduct', (w, b))
    for name, (w, b) in arrays.items()
  ]
  layers[1:1] = [(f'{kind.lower()}1', kind, ()) for kind in order]
  layers[-1] = last, *layers[-1][1:]
  for name, kind, blobs in layers:
    layer = getattr(message, 'layer' if form == 'layer' else 'layers').add()
    layer = layer.layer if form == 'V0' else layer
    layer.name = name
    layer.type = kind if form == 'layer' else _TYPES[kind][form == 'V0']
    for array in blobs:
      blob = layer.blobs.add()
      if form == 'layer':
        blob.shape.dim.extend(array.shape)
      else:
        axes = (1,) * (4 - array.ndim) + array.shape
        blob.num, blob.channels, blob.height, blob.width = axes
      if packed == 'bytes':
        blob.data = array.tobytes()
      else:
        getattr(blob, 'data' if dtype == 'f4' else 'double_data').extend(array.ravel())
  return message.SerializeToString()


def _net_parameter(packed):
  """The class of NetParameter, from those fields of caffe.proto that are written."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  kinds = descriptor_pb2.FieldDescriptorProto
  scalars = {
    'string': kinds.TYPE_STRING,
    'int32': kinds.TYPE_INT32,
    'int64': kinds.TYPE_INT64,
    'bytes': kinds.TYPE_BYTES,
    'float': kinds.TYPE_FLOAT,
    'double': kinds.TYPE_DOUBLE,
  }
  table = {
    'BlobShape': 'dim 1 int64 *',
    'BlobProto': 'num 1 int32, channels 2 int32, height 3 int32, width 4 int32,'
    f' data 5 {"bytes" if packed == "bytes" else "float *"}, shape 7 BlobShape,'
    ' double_data 8 double *',
    'V0LayerParameter': 'name 1 string, type 2 string, blobs 50 BlobProto *',
    # An enum travels as an int32.
    'V1LayerParameter': 'layer 1 V0LayerParameter, name 4 string, type 5 int32,'
    ' blobs 6 BlobProto *',
    'LayerParameter': 'name 1 string, type 2 string, blobs 7 BlobProto *',
    'NetParameter': 'name 1 string, layers 2 V1LayerParameter *, layer 100 LayerParameter *',
  }
  file = descriptor_pb2.FileDescriptorProto(name='caffe.proto', package='caffe', syntax='proto2')
  for message, fields in table.items():
    descriptor = file.message_type.add(name=message)
    for name, number, kind, *repeated in map(str.split, fields.split(',')):
      field = descriptor.field.add(name=name, number=int(number))
      field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
      if kind in scalars:
        field.type = scalars[kind]
        if repeated:
          field.options.packed = bool(packed)
      else:
        field.type, field.type_name = kinds.TYPE_MESSAGE, f'.caffe.{kind}'
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName('caffe.NetParameter'))
