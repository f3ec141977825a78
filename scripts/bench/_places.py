"""Which layer, and which pass through it, an instruction works for."""

import math
import re

from flax import linen as nn
import jax

PASSES = ('forward', 'input gradient', 'weight gradient', 'backward', '')
# jvp(ResNet) and transpose(jvp(ResNet)) are ResNet; jit(relu) stays.
_TRANSFORMS = re.compile(r'\b(?:transpose|jvp|vmap|shard_map)\(([^()]*)\)')


class Layer:
  """A layer with a kernel or a scale, as the model calls it.

  Attributes:
    kind: such as '3x3 convolution'.
    flops: of a forward pass, and of each gradient; 0 for a norm.
    kernel, inputs: elements of the kernel and of the input.
    learned_input: whether the loss has a gradient for the input.
  """

  def __init__(self, kernel, inputs, outputs, learned_input=True):
    """Takes the shapes of the kernel (or scale), the input and the output."""
    names = {1: 'norm', 2: 'head'}
    rows, columns, channels = kernel[:3] if len(kernel) == 4 else (0, 0, 0)
    kind = 'convolution' if learned_input else 'stem'
    if 0 < channels < inputs[-1]:
      kind = f'{"depthwise" if channels == 1 else "grouped"} {kind}'
    self.kind = names.get(len(kernel), f'{rows}x{columns} {kind}')
    self.kernel, self.inputs = math.prod(kernel), math.prod(inputs)
    self.learned_input = learned_input
    # 2 N H' W' kh kw Cin Cout: each output meets a whole filter once.
    self.flops = 0
    if len(kernel) > 1:
      self.flops = 2 * math.prod(outputs) * math.prod(kernel[:-1])


def shapes(model, images, variables) -> dict[str, Layer]:
  """The layers of a model that have a kernel or a scale.

  Args:
    model: Flax module called (images, train).
    images: jax.ShapeDtypeStruct (batch, height, width, 3).
    variables: of the model, or their shapes.

  Returns:
    Path, such as 'stage1_block1/conv1', to layer.
  """
  layers = {}

  def note(call, args, kwargs, context):
    out = call(*args, **kwargs)
    params = context.module.variables.get('params', {})
    kernel = params.get('kernel', params.get('scale'))
    if context.method_name == '__call__' and hasattr(kernel, 'shape'):
      layers['/'.join(context.module.path)] = Layer(
        kernel.shape, args[0].shape, out.shape, learned_input=args[0].shape != images.shape
      )
    return out

  if hasattr(model, 'platform'):  # one that calls each layer by itself
    model = model.clone(platform='cpu')
  with nn.intercept_methods(note):
    jax.eval_shape(lambda v, x: model.apply(v, x, False), variables, images)
  return layers


def flops(layers: dict[str, Layer]) -> dict[tuple[str, str], int]:
  """Operations of a step by kind and pass, in closed form."""
  result = {}
  for layer in layers.values():
    for direction in PASSES[:3]:
      counts = layer.learned_input or direction != 'input gradient'
      if layer.flops and counts:
        key = (layer.kind, direction)
        result[key] = result.get(key, 0) + layer.flops
  # The two gradients of a head are told apart no more than those of a norm.
  if ('head', 'forward') in result:
    gradients = ('input gradient', 'weight gradient')
    result['head', 'backward'] = sum(result.pop(('head', g)) for g in gradients)
  return result


def place(program, instruction, model: str, layers) -> tuple[str, str]:
  """The kind of layer and the pass that an instruction works for.

  Args:
    program: `program_lib.Program`.
    instruction: `program_lib.Instruction` of it.
    model: the class of the network, such as 'ResNet'.
    layers: from `shapes`.

  Returns:
    Kind and pass; ('update', '') and the like have none.
  """
  origin = program.origin(instruction)
  if '/' not in origin:
    return 'other', ''
  path = _inside(origin, model)
  direction = 'backward' if 'transpose(' in origin else 'forward'
  if path is None:
    if 'jvp(' not in origin:
      return 'update', ''
    return ('input', '') if '/input/' in origin else ('loss', direction)
  layer = _layer(path, layers)
  if layer is None:
    return _without_weights(path), direction
  if direction == 'backward' and not layer.learned_input:
    direction = 'weight gradient'
  elif direction == 'backward' and layer.kind.endswith('convolution'):
    direction = _gradient(program, instruction, layer, model, layers)
  return layer.kind, direction


def layer_name(program, instruction, model: str, layers) -> str:
  """The path of the layer with weights that an instruction works for.

  Args:
    program: `program_lib.Program`.
    instruction: `program_lib.Instruction` of it.
    model: the class of the network, such as 'ResNet'.
    layers: from `shapes`.

  Returns:
    Such as 'conv1'; of what has no weights the kind that `place` gives.
  """
  path = _inside(program.origin(instruction), model)
  name = path and _deepest(path, layers)
  return name or place(program, instruction, model, layers)[0]


def _inside(origin, model):
  """The path below the model in an op_name; None outside of it."""
  before = ''
  while origin != before:
    before, origin = origin, _TRANSFORMS.sub(r'\1', origin)
  _, inside, path = f'/{origin}/'.partition(f'/{model}/')
  return path if inside else None


def _layer(path, layers):
  """The deepest layer with weights that a path is in, or None."""
  return layers.get(_deepest(path, layers))


def _deepest(path, layers):
  """The path of the deepest layer with weights that a path is in, or ''."""
  # Flax also names the method that a layer is called from: 'block1._gated'.
  parts = [part for part in path.split('/') if '.' not in part]
  prefixes = ('/'.join(parts[:end]) for end in range(len(parts), 0, -1))
  return next((name for name in prefixes if name in layers), '')


def _without_weights(path):
  if 'max_pool/' in path:
    return 'max pool'
  # What the model does itself is a relu, or the mean over the map.
  mean = ('mul/', 'div/', 'reduce_sum/', 'broadcast_in_dim/')
  return 'head' if path.startswith(mean) else 'activation and add'


def _gradient(program, instruction, layer, model, layers):
  """Which gradient of a convolution an instruction works for.

  What is no matrix product works for the product of the layer that it leads
  to. From there on the first result that is as large as the kernel or the
  input tells, in the layer or just behind it.
  """

  def same(i):
    origin = program.origin(i)
    path = _inside(origin, model) if 'transpose(' in origin else None
    return path is not None and _layer(path, layers) is layer

  def sized(i):
    weight, inputs = layer.kernel in i.elements, layer.inputs in i.elements
    if weight == inputs:
      return None
    return 'weight gradient' if weight else 'input gradient'

  chain = [instruction, *program.users(instruction, same)]
  for i in chain:
    product = program.product(i)
    if product and same(i):
      chain = [product, i, *program.users(i, same)]
      break
  return next(filter(None, map(sized, chain)), 'backward')
