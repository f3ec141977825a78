"""GF/s of a network's convolutions by layer and pass, here and in PyTorch.

  python scripts/bench/convolutions.py [--cases=resnet50_224,lenet]
    [--dtype=float32,bfloat16] [--rounds=5]

Each layer of `step.py`'s cases is computed alone, on random numbers that stay
in the caches where they fit: the forward pass, the input gradient and the
weight gradient, each as a program of its own.

  ours   as the layer is lowered in training: oneDNN where it is found
  xla    as with model.cpu_library='xla'
  torch  conv2d and convolution_backward of PyTorch, channels last, eager

Each contestant is a process of its own, which sleeps while the others take
their turns, in an order by chance. A turn's time is the median of its runs.
GF/s are the mathematics' operations over the median of the rounds' times; from
JAX's times that of an empty program is taken away, which in training is paid
once a step. The totals are of all layers of the network, each as often as it
occurs. A ratio is of one round, and the table has the medians.
"""

import argparse
from collections.abc import Callable
import functools
import importlib.util
import math
import time
from typing import NamedTuple

import _cases
import _common
import _contest

_CASES = ('resnet50_224', 'resnet50_64', 'lenet', 'cifar10_full')
_PASSES = ('forward', 'input gradient', 'weight gradient')
_CONTESTANTS = ('ours', 'xla', 'torch')


class Layer(NamedTuple):
  """A convolution.

  Attributes:
    image: (batch, height, width, channels).
    kernel: (height, width, channels of a group, features).
    stride: pixels, both ways.
    padding: pixels, on each side.
    is_first: whether nobody asks for the input's gradient.
  """

  image: tuple[int, ...]
  kernel: tuple[int, ...]
  stride: int
  padding: int
  is_first: bool

  @property
  def groups(self) -> int:
    """Parts of the channels, each convolved with its share of features."""
    return self.image[-1] // self.kernel[2]

  @property
  def flops(self) -> int:
    """Operations of each pass: each result meets a whole filter once."""
    rows, columns = (
      (n + 2 * self.padding - k) // self.stride + 1 for n, k in zip(self.image[1:3], self.kernel)
    )
    return 2 * self.image[0] * rows * columns * math.prod(self.kernel)

  @property
  def passes(self) -> tuple[str, ...]:
    """Those that training asks for."""
    return tuple(p for p in _PASSES if not (self.is_first and p == _PASSES[1]))

  def __str__(self):
    height, width, _, features = self.kernel
    shape = 'x'.join(map(str, self.image[1:]))
    stride = f'/{self.stride}' * (self.stride > 1)
    groups = f', {self.groups} groups' * (self.groups > 1)
    return f'{shape}, {height}x{width}{stride} to {features}{groups}'


def main():
  """Runs the cases, and prints a table of each."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--cases', default=','.join(_CASES))
  parser.add_argument('--dtype', default='float32,bfloat16')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=0.03, help='a turn')
  _contest.add_max_isa(parser)
  parser.add_argument('--worker', nargs=1, help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.worker:
    _work(*flags.worker)
    return
  for name in (names := flags.cases.split(',')):
    if name not in _cases.CASES:
      parser.error(f'--cases={name}: expected some of {", ".join(_CASES)}')
  workers = _start(flags.max_isa)
  ratios = {}
  try:
    for name in names:
      for dtype in flags.dtype.split(','):
        _measure(name, dtype, workers, flags, ratios)
  finally:
    for worker in workers.values():
      worker.close()
  _common.show_ratios(ratios)


def _start(max_isa):
  """The contestants that can compute here, by name."""
  workers = {}
  for name in _CONTESTANTS:
    if name == 'torch' and importlib.util.find_spec('torch') is None:
      print('skipped: no PyTorch here')
      continue
    variables = _contest.environment(name != 'torch', max_isa)
    workers[name] = _contest.Worker(__file__, [name], variables)
  library = workers['ours'].ready['library']
  if library:
    print(f'ours computes with {library}')
  else:
    print('skipped: xla: ours computes with XLA alone')
    workers.pop('xla').close()
  return workers


def layers(case: _cases.Case) -> dict[Layer, int]:
  """The convolutions of a case's network, and how often each occurs."""
  from flax import linen as nn
  import jax
  import jax.numpy as jnp

  from anp_jax import models

  net = models.create(_cases.config(case), case.classes, 'cpu')
  shape = (case.batch, case.side, case.side, case.channels)
  result = {}

  def note(call, args, kwargs, context):
    if context.method_name == 'convolve':
      x, kernel, padding = args
      # Of the networks here; 'SAME' and unequal edges do not occur.
      pixels = {'VALID': 0}.get(padding, padding)
      layer = Layer(x.shape, kernel.shape, context.module.stride, pixels, x.shape == shape)
      result[layer] = result.get(layer, 0) + 1
    return call(*args, **kwargs)

  def traced(images):
    # Without training: a norm that initialises takes no groups.
    return net.init(jax.random.key(0), images, False)

  with nn.intercept_methods(note):
    jax.eval_shape(traced, jax.ShapeDtypeStruct(shape, jnp.float32))
  return result


def _measure(name, dtype, workers, flags, ratios):
  """One case in one dtype: its table, and its ratios."""
  counts = layers(_cases.CASES[name])
  # By contestant and pass, each round's seconds of all layers.
  totals = {(c, p): [0.0] * flags.rounds for c in workers for p in (*_PASSES, 'all')}
  flops = dict.fromkeys((*_PASSES, 'all'), 0)
  rows = [('layer', 'times', 'pass', *_headings(workers))]
  for layer, count in counts.items():
    seconds = _rounds(layer, dtype, workers, flags)
    for direction in layer.passes:
      seconds_of = {c: seconds[c, direction] for c in workers}
      rows.append((str(layer), count, direction, *_cells(seconds_of, layer.flops)))
      for key in (direction, 'all'):
        flops[key] += count * layer.flops
        for c in workers:
          for i, value in enumerate(seconds_of[c]):
            totals[c, key][i] += count * value
  for direction, count in flops.items():
    if count:
      seconds_of = {c: totals[c, direction] for c in workers}
      rows.append(('all layers', '', direction, *_cells(seconds_of, count)))
      for peer in list(workers)[1:]:
        key = f'{name}_{dtype}_{direction.replace(" ", "_")}_over_{peer}'
        ratios[key] = _contest.over(seconds_of['ours'], seconds_of[peer]).median
  _common.show_table(f'convolutions of {name}, {dtype}', rows)


def _headings(workers):
  peers = list(workers)[1:]
  return [f'{c}, GF/s' for c in workers] + [f'over {p}' for p in peers]


def _cells(seconds, flops):
  """GF/s of each contestant, and how many times as fast ours is."""
  rates = [flops / _common.median(times) / 1e9 for times in seconds.values()]
  ours, *peers = seconds.values()
  over = [_contest.over(ours, times).median for times in peers]
  return [f'{r:.1f}' for r in rates] + [f'{r:.2f}' for r in over]


def _rounds(layer, dtype, workers, flags):
  """Seconds of a run, by contestant and pass, in each round."""
  for worker in workers.values():
    worker.ask(what='prepare', layer=layer, dtype=dtype)
  turns = [(c, p) for c in workers for p in layer.passes]
  seconds = {turn: [] for turn in turns}
  for order in _contest.rounds(turns, flags.rounds):
    for contestant, direction in order:
      reply = workers[contestant].ask(what=direction, seconds=flags.seconds)
      seconds[contestant, direction].append(reply['seconds'])
  return seconds


def _work(contestant):
  """A worker: prepares a layer, or times one of its passes."""
  questions, answer = _contest.questions()
  if contestant == 'torch':
    import torch  # noqa: F401

    prepare, empty, library = torch_passes, None, ''
  else:
    platform, library = _our_platform(contestant)
    prepare = functools.partial(our_passes, platform=platform)
    empty = _empty_program()
  answer(library=library)
  programs = {}
  for question in questions:
    what = question['what']
    if what == 'prepare':
      image, kernel, *fields = question['layer']
      layer = Layer(tuple(image), tuple(kernel), *fields)
      programs.clear()
      programs.update(prepare(layer, question['dtype']))
      for program in programs.values():
        program()
      answer()
      continue
    seconds = _seconds(programs[what], question['seconds'])
    if empty:
      # Not all of it: a program that is hardly longer has a time, too.
      nothing = _seconds(empty, question['seconds'] / 4)
      seconds = max(seconds - nothing, seconds / 10)
    answer(seconds=seconds)


def _seconds(program, at_least):
  """Seconds of the middle one of as many runs as take a time, at least 3.

  The first of a turn wakes threads up.
  """
  took, start = [], time.perf_counter()
  while (now := time.perf_counter()) < start + at_least or len(took) < 3:
    program()
    took.append(time.perf_counter() - now)
  return _common.median(took)


def _our_platform(contestant):
  """What layers are made for, and what computes them in XLA's place."""
  from anp_jax import models
  from anp_jax.system import onednn

  choice = 'xla' if contestant == 'xla' else 'auto'
  config = _cases.config(_cases.CASES['tiny'], cpu_library=choice)
  platform = models.target(config, 'cpu')
  opened = onednn.find() if platform == onednn.PLATFORM else None
  onednn.call = alone(onednn.call)
  return platform, opened.describe() if opened else ''


def _empty_program():
  import jax
  import jax.numpy as jnp

  x = jnp.zeros(1)
  program = jax.jit(lambda x: x + 1).lower(x).compile()
  program(x)
  return lambda: program(x).block_until_ready()


def our_passes(layer: Layer, dtype: str, platform: str) -> dict[str, Callable]:
  """Programs of our layer, by pass; each waits for its result and returns it.

  Args:
    layer: what is computed.
    dtype: of the arrays.
    platform: that layers are made for.
  """
  import jax
  import jax.numpy as jnp

  from anp_jax.models.layers import convolution

  def forward(x, kernel):
    return convolution.convolve(x, kernel, layer.stride, layer.padding, platform, layer.groups)

  def input_gradient(x, kernel, dy):
    return jax.vjp(lambda x: forward(x, kernel), x)[1](dy)[0]

  def weight_gradient(x, kernel, dy):
    return jax.vjp(lambda kernel: forward(x, kernel), kernel)[1](dy)[0]

  x, kernel, dy = (jnp.asarray(a, dtype) for a in arrays(layer))

  def program(function, *arguments):
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: compiled(*arguments).block_until_ready()

  programs = (
    program(forward, x, kernel),
    program(input_gradient, x, kernel, dy),
    program(weight_gradient, x, kernel, dy),
  )
  return dict(zip(_PASSES, programs))


def alone(call: Callable) -> Callable:
  """Returns `onednn.call` without the argument that sets an order.

  A weight gradient waits for the input's, which would be timed with it.
  """

  def called(spec, results, *arguments):
    if getattr(spec, 'waits', False):
      spec, arguments = spec._replace(waits=False), arguments[:-1]
    return call(spec, results, *arguments)

  return called


def torch_passes(layer: Layer, dtype: str) -> dict[str, Callable]:
  """The same in PyTorch; results have its order of axes."""
  import torch

  def tensor(array, *order):
    values = torch.from_numpy(array.transpose(order))
    values = values.to(getattr(torch, dtype))
    return values.contiguous(memory_format=torch.channels_last)

  x, kernel, dy = arrays(layer)
  x, dy = (tensor(a, 0, 3, 1, 2) for a in (x, dy))
  kernel = tensor(kernel, 3, 2, 0, 1)
  pixels = [layer.padding] * 2
  strides, groups = [layer.stride] * 2, layer.groups

  def forward():
    with torch.no_grad():
      return torch.nn.functional.conv2d(x, kernel, None, strides, pixels, groups=groups)

  def gradient(place):
    mask = [place == i for i in range(3)]
    return torch.ops.aten.convolution_backward(
      dy, x, kernel, [0], strides, pixels, [1, 1], False, [0, 0], groups, mask
    )[place]

  programs = (forward, functools.partial(gradient, 0), functools.partial(gradient, 1))
  return dict(zip(_PASSES, programs))


def arrays(layer: Layer) -> list:
  """Random x, kernel and gradient of the result, as JAX orders their axes."""
  import numpy as np

  rows, columns = (
    (n + 2 * layer.padding - k) // layer.stride + 1 for n, k in zip(layer.image[1:3], layer.kernel)
  )
  result = (layer.image[0], rows, columns, layer.kernel[-1])
  random = np.random.default_rng(0)
  return [
    random.standard_normal(shape, np.float32) for shape in (layer.image, layer.kernel, result)
  ]


if __name__ == '__main__':
  main()
