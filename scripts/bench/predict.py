"""Times naming image files here and in PyTorch, in one run.

  python scripts/bench/predict.py [--rounds=5] [--files=64] [--side=224]
  python scripts/bench/predict.py --memory

ResNet-50 of 1,000 classes with random weights, JPEG files of 500 x 375 pixels,
from the file to the best five names: ours is what `python -m anp_jax.predict`
runs. PyTorch's is in eval mode, channels last, under inference_mode, fed by as
many threads that decode, resize and crop with Pillow. Each contestant is a
process of its own, asleep while the other takes its turn. Batch sizes are tried
first, and each goes on with its best; a ratio is of one round, and the table's
its median. `network` is without files: one batch that lies in memory.

--memory names 1,000 and 10,000 small files by the command itself, with a tiny
network, and compares the most memory that it held.
"""

import argparse
import collections
from concurrent import futures
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import types

import _common
import numpy as np

from anp_jax.system import xla_flags

_SIZES = (4, 8, 16, 32)  # of batches
_GOAL, _MEMORY_GOAL = 1.0, 1.05
_CLASSES, _TOP = 1000, 5


def main():
  """Measures speed, or memory."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--files', type=int, default=64, help='a turn')
  parser.add_argument('--side', type=int, default=224)
  parser.add_argument('--model', default='resnet50', help='ours; to try out')
  parser.add_argument('--memory', action='store_true')
  parser.add_argument('--counts', type=int, nargs=2, default=(1000, 10000))
  parser.add_argument('--worker', nargs=4, help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.files % max(_SIZES):
    parser.error(f'--files={flags.files}: expected a multiple of {max(_SIZES)}')
  if flags.worker:
    _work(*flags.worker)
  elif flags.memory:
    _memory(flags.counts)
  else:
    with tempfile.TemporaryDirectory() as folder:
      _write_files(folder, flags.files, (500, 375))
      _speed(flags, folder)


def _write_files(folder, count, size):
  rng = np.random.default_rng(0)
  from PIL import Image

  # Few pictures under many names, of about 50 KB at 500 x 375.
  photographs = []
  for _ in range(min(count, 16)):
    coarse = rng.integers(0, 256, (size[1] // 12, size[0] // 12, 3), np.uint8)
    picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    noise = rng.normal(0, 6, (size[1], size[0], 3))
    picture = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(picture).save(data, 'JPEG', quality=85)
    photographs.append(data.getvalue())
  for i in range(count):
    with open(os.path.join(folder, f'{i:05}.jpg'), 'wb') as f:
      f.write(photographs[i % len(photographs)])


def _speed(flags, folder):
  workers = {
    name: _Worker(name, folder, str(flags.side), flags.model)
    for name in ('ours', 'torch')
  }
  try:
    best = {}
    for name, worker in workers.items():
      rates = {}
      for size in _SIZES:
        worker.ask(what='files', size=size, count=2 * size)  # compiles
        seconds = worker.ask(what='files', size=size, count=flags.files)
        rates[size] = flags.files / seconds
      best[name] = max(rates, key=rates.get)
      tried = ', '.join(f'{k}: {v:.1f}' for k, v in rates.items())
      print(f'{name}: images/s by batch size: {tried}', flush=True)
    rows = [('naming files, resnet50', 'median', 'lowest', 'goal', '')]
    ratios = {f'{name}_batch_size': size for name, size in best.items()}
    for what, label in (
      ('files', 'from files to names'), ('network', 'network alone'),
    ):  # fmt: skip
      seconds = {name: [] for name in workers}
      for i in range(flags.rounds):
        # Every other round backwards: no one is always first.
        for name in list(workers)[:: -1 if i % 2 else 1]:
          seconds[name].append(
            workers[name].ask(what=what, size=best[name], count=flags.files)
          )
      _show(rows, ratios, what, label, seconds, flags.files)
  finally:
    for worker in workers.values():
      worker.close()
  _common.show('ours over PyTorch', rows, ratios)


def _show(rows, ratios, what, label, seconds, count):
  for name, times in seconds.items():
    rate, lowest = (count / f(times) for f in (_common.median, max))
    ratios[f'{what}_{name}_images_per_second'] = rate
    rows.append((
      f'{label}: {name}, images/s', f'{rate:.1f}', f'{lowest:.1f}', '', '',
    ))  # fmt: skip
  over = [b / a for a, b in zip(seconds['ours'], seconds['torch'])]
  ratio = _common.median(over)
  ratios[f'{what}_over_torch'] = ratio
  rows.append((
    f'{label}: times as fast', f'{ratio:.2f}', f'{min(over):.2f}',
    f'>= {_GOAL}', 'met' if ratio >= _GOAL else 'missed',
  ))  # fmt: skip


class _Worker:
  """A process that holds one contestant, asleep until it is asked."""

  def __init__(self, *arguments):
    environment = dict(os.environ)
    # The allocator's settings make PyTorch quicker too; XLA's are ours alone.
    xla_flags.use_huge_pages(environment, restart=lambda *_: None)
    if arguments[0] == 'ours':
      xla_flags.enable(environment)
    self._process = subprocess.Popen(
      [sys.executable, os.path.abspath(__file__), '--worker', *arguments],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
      env=environment,
    )  # fmt: skip

  def ask(self, **question) -> float:
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(json.dumps(question) + '\n')
      self._process.stdin.flush()
    line = self._process.stdout.readline()
    if not line:
      sys.exit('a contestant ended without an answer')
    return json.loads(line)

  def close(self):
    self._process.kill()
    self._process.communicate()


def _work(name, folder, side, model):
  """A worker: answers each line of its input with seconds."""
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  make = _ours if name == 'ours' else _torch
  contestant = make(int(side), model)
  paths = sorted(os.path.join(folder, f) for f in os.listdir(folder))
  for line in sys.stdin:
    question = json.loads(line)
    size, count = question['size'], question['count']
    if question['what'] == 'network':
      contestant.network(size, size)
    start = time.perf_counter()
    if question['what'] == 'network':
      contestant.network(size, count)
    else:
      named = contestant.files(
        list(itertools.islice(itertools.cycle(paths), count)), size
      )
      if named != count:
        sys.exit(f'{name}: {named} of {count} files were named')
    print(time.perf_counter() - start, file=answers, flush=True)


def _config(side, model):
  from anp_jax.config import command_line

  root = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
  return command_line.load(
    os.path.join(root, 'configs', 'resnet_anp.py'),
    {
      'data.image_size': str(side),
      'data.resize': str(side * 8 // 7),
      'model.name': model,
    },
  )


def _ours(side, model):
  import jax
  import jax.numpy as jnp

  from anp_jax import models
  from anp_jax.checkpoint import trained as trained_lib
  from anp_jax.data import vocabulary
  from anp_jax.data.input import decode_pillow
  from anp_jax.predict import __main__ as predict
  from anp_jax.predict import files
  from anp_jax.predict import network as network_lib
  from anp_jax.predict import rows

  config = _config(side, model)
  classes = vocabulary.Vocabulary(
    tuple(f'class{i:03}' for i in range(_CLASSES))
  )
  images = jnp.zeros((1, side, side, 3))
  net = models.create(config, _CLASSES, 'cpu')
  variables = dict(
    jax.jit(lambda key: net.init(key, images, False))(jax.random.key(0))
  )
  params = variables.pop('params')
  trained = trained_lib.Trained('', config, classes, 0, params, variables)
  network_of = {}
  table = rows.Rows(classes)

  def network(size):
    if size not in network_of:
      network_of[size] = network_lib.Network(trained, _TOP, size)
    return network_of[size]

  def name_files(paths, size):
    net = network(size)
    batches = files.batches(
      files.find(paths), decode_pillow.eval_decoder(config),
      net.batch_size, side, len(os.sched_getaffinity(0)),
    )  # fmt: skip
    predictions = []
    for batch, names in predict.named(net, batches):
      predictions += [
        table.file_rows(f, names, i) for i, f in enumerate(batch.files)
      ]
    return len(predictions)

  def run(size, count):
    net = network(size)
    batch = np.random.default_rng(0).integers(
      0, 256, (net.batch_size, side, side, 3), np.uint8
    )
    pending = collections.deque()
    for _ in range(count // size):
      pending.append(net.start(batch))
      if len(pending) > 1:
        net.names(pending.popleft(), size)
    while pending:
      net.names(pending.popleft(), size)

  return types.SimpleNamespace(files=name_files, network=run)


def _torch(side, model):
  import _peers
  from PIL import Image
  import torch

  if model != 'resnet50':
    sys.exit(f'--model={model}: the peer is a resnet50')
  case = types.SimpleNamespace(model=model, channels=3, classes=_CLASSES)
  torch.manual_seed(0)
  last = torch.channels_last
  net = _peers.torch_network(case).to(memory_format=last).eval()
  mean = torch.tensor((123.68, 116.78, 103.94))[:, None, None]
  std = torch.tensor((58.4, 57.1, 57.4))[:, None, None]
  shorter = side * 8 // 7

  def decode(path):
    with Image.open(path) as image:
      image = image.convert('RGB')
    share = shorter / min(image.size)
    size = [round(n * share) for n in image.size]
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = ((n - side) // 2 for n in size)
    image = image.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.array(image))

  @torch.inference_mode()
  def names(pixels):
    images = pixels.permute(0, 3, 1, 2)  # channels last, without a copy
    predictions = net((images.float() - mean) / std).softmax(-1).topk(_TOP)
    return predictions.indices.numpy(), predictions.values.numpy()

  def name_files(paths, size):
    threads = len(os.sched_getaffinity(0))
    predictions = []
    with futures.ThreadPoolExecutor(threads) as pool:
      waiting, paths = collections.deque(), iter(paths)
      while True:
        for path in itertools.islice(paths, 2 * size + threads - len(waiting)):
          waiting.append(pool.submit(decode, path))
        if not waiting:
          return len(predictions)
        some = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        labels, _ = names(torch.stack([f.result() for f in some]))
        predictions += labels.tolist()

  def run(size, count):
    batch = torch.randint(0, 256, (size, side, side, 3), dtype=torch.uint8)
    for _ in range(count // size):
      names(batch)

  return types.SimpleNamespace(files=name_files, network=run)


def _memory(counts):
  """The most memory of the command, for few files and for many."""
  with tempfile.TemporaryDirectory() as folder:
    run = os.path.join(folder, 'run')
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
    subprocess.run(
      [sys.executable, 'main.py', '--config=configs/resnet_anp.py:tiny',
       f'--workdir={run}', '--config.duration=2 steps',
       '--config.log.tensorboard=False'],
      check=True, cwd=root, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    most = {}
    # The first run compiles, which takes more than naming does.
    for count in (10, *counts):
      images = os.path.join(folder, str(count))
      os.makedirs(images)
      _write_files(images, count, (96, 72))
      code = (
        'import sys; from anp_jax import predict; '
        'status = predict.main(sys.argv); '
        "line = next(x for x in open('/proc/self/status') if 'VmHWM' in x); "
        'print(line.split()[1], file=sys.stderr); sys.exit(status)'
      )
      done = subprocess.run(
        [sys.executable, '-c', code, f'--checkpoint={run}', images,
         f'--output={os.path.join(folder, "names.csv")}'],
        check=True, cwd=root, stderr=subprocess.PIPE, text=True,
      )  # fmt: skip
      *_, last_seconds, kilobytes = done.stderr.strip().splitlines()
      most[count] = int(kilobytes) / 1024
      print(last_seconds, flush=True)
  few, many = counts
  del most[10]
  ratio = most[many] / most[few]
  rows = [('memory of the command', 'MiB')]
  rows += [(f'{count:,} files', f'{mib:.0f}') for count, mib in most.items()]
  met = 'met' if ratio <= _MEMORY_GOAL else 'missed'
  rows.append((f'ratio, goal <= {_MEMORY_GOAL}: {met}', f'{ratio:.3f}'))
  ratios = {f'memory_{count}_mib': mib for count, mib in most.items()}
  _common.show('constant memory', rows, ratios | {'memory_ratio': ratio})


if __name__ == '__main__':
  main()
