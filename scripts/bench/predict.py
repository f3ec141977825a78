"""Times naming image files here, in PyTorch and in ONNX Runtime, in one run.

  python -m scripts.bench.predict [--rounds=8] [--files=64] [--side=224]
    [--dtype=float32,bfloat16] [--what=files,network]
  python -m scripts.bench.predict --memory

ResNet-50 of 1,000 classes with random weights, JPEG files of 500 x 375 pixels,
from the file to the best five names: ours is what `python -m anp_jax.predict`
runs, on a CPU with oneDNN where it is found. Peers are fed by as many threads
that decode, resize and crop with Pillow:

  torch_eager    PyTorch in eval mode, channels last, under inference_mode; for
                 bfloat16 the network itself is converted
  torch_compile  the same through torch.compile
  torch          whichever of the two was the faster
  onnx           the same network in ONNX Runtime, where it is installed

Each contestant is a process of its own, asleep while the others take their
turns, in an order by chance. Batch sizes are tried first, with the network
alone, and each contestant goes on with its best; a ratio is of one round, and
the table has the median, the lowest and the quartiles. `network` is without
files: one batch that lies in memory, from pixels to numbers of the best five.

--memory names 1,000 and 10,000 small files by the command itself, with a tiny
network, and compares the most memory that it held.
"""

import argparse
import collections
import functools
import io
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types

import numpy as np

from scripts.bench import _common, _contest, _predict_peers

_PEERS = ('torch_eager', 'torch_compile', 'onnx')
_LABELS = {'files': 'from files to names', 'network': 'network alone'}
_GOALS = collections.defaultdict(lambda: 1.0, {('network', 'float32'): 1.1})
_MEMORY_GOAL = 1.05
_TOP = 5


def main():
  """Measures speed, or memory."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=8)
  parser.add_argument('--files', type=int, default=64, help='files per round')
  parser.add_argument('--side', type=int, default=224)
  parser.add_argument('--sizes', type=_common.counts, default=(4, 8, 16, 32), help='batch sizes')
  parser.add_argument('--dtype', default='float32,bfloat16')
  parser.add_argument('--what', default=','.join(_LABELS))
  parser.add_argument('--peers', default=','.join(_PEERS))
  parser.add_argument('--model', default='resnet50', help='network, such as resnet18')
  parser.add_argument('--memory', action='store_true')
  parser.add_argument('--counts', type=int, nargs=2, default=(1000, 10000))
  parser.add_argument('--worker', nargs=5, help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.worker:
    _work(*flags.worker)
    return
  if any(flags.files % size for size in flags.sizes):
    parser.error(f'--files={flags.files}: expected a multiple of {flags.sizes}')
  if flags.memory:
    _memory(flags.counts)
    return
  rows = [('naming files', *_contest.HEADING)]
  ratios = {}
  with tempfile.TemporaryDirectory() as folder:
    _write_files(folder, flags.files, (500, 375))
    for dtype in flags.dtype.split(','):
      _speed(flags, folder, dtype, rows, ratios)
  _common.show('ours over its peers', rows, ratios)


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
    pathlib.Path(folder, f'{i:05}.jpg').write_bytes(photographs[i % len(photographs)])


def _speed(flags, folder, dtype, rows, ratios):
  """One dtype: starts, batch sizes, rounds, and its lines of the table."""
  workers = _start(flags, folder, dtype)
  try:
    best = {}
    for name, worker in workers.items():
      rates = {}
      for size in flags.sizes:
        worker.ask(what='network', size=size, count=2 * size)  # compiles
        reply = worker.ask(what='network', size=size, count=flags.files)
        rates[size] = flags.files / reply['seconds']
      best[name] = max(rates, key=rates.get)
      ratios[f'{dtype}_{name}_batch_size'] = best[name]
      tried = ', '.join(f'{k}: {v:.1f}' for k, v in rates.items())
      print(f'{dtype}: {name}: images/s by batch size: {tried}', flush=True)
    for what in flags.what.split(','):
      questions = {name: {'what': what, 'size': best[name], 'count': flags.files} for name in best}
      seconds = _contest.times(workers, flags.rounds, questions.get)
      _show(rows, ratios, (what, dtype), seconds, flags.files)
  finally:
    for worker in workers.values():
      worker.close()


def _start(flags, folder, dtype):
  """The contestants that can compute here, by name."""
  workers = {}
  for name in ('ours', *flags.peers.split(',')):
    arguments = [name, folder, str(flags.side), flags.model, dtype]
    try:
      workers[name] = _contest.Worker('predict', arguments, _contest.environment(name == 'ours'))
    except _contest.PeerLostError as e:
      if name == 'ours':
        raise
      print(f'skipped: {dtype}: {name}: {e}')
  library = workers['ours'].ready['library'] or 'XLA alone'
  print(f'{dtype}: ours computes with {library}', flush=True)
  return workers


def _show(rows, ratios, which, seconds, count):
  what, dtype = which
  label = f'{dtype}, {_LABELS[what]}'
  speeds, overs = _contest.speeds(label, seconds, {'torch': _GOALS[which]})
  for name, times in seconds.items():
    text, rate = _contest.images_per_second(f'{label}: {name}, images/s', count, times)
    rows.append(text)
    overs[f'{name}_images_per_second'] = rate
  rows += speeds
  ratios |= {f'{dtype}_{what}_{name}': value for name, value in overs.items()}


def _work(name, folder, side, model, dtype):
  """A worker: answers each question with seconds."""
  questions, answer = _contest.questions()
  if name == 'ours':
    contestant = _ours(int(side), model, dtype)
  else:
    contestant = _predict_peers.create(name, int(side), model, dtype, _TOP)
  # What the network cannot compute is said at the start.
  contestant.network(1, 1)
  answer(library=contestant.library)
  paths = sorted(os.path.join(folder, f) for f in os.listdir(folder))
  for question in questions:
    size, count = question['size'], question['count']
    start = time.perf_counter()
    if question['what'] == 'network':
      contestant.network(size, count)
    else:
      named = contestant.files(list(itertools.islice(itertools.cycle(paths), count)), size)
      if named != count:
        sys.exit(f'{name}: {named} of {count} files were named')
    answer(seconds=time.perf_counter() - start)


def _trained(config):
  """A network with random weights, as a run would have left it."""
  import jax
  import jax.numpy as jnp

  from anp_jax import models
  from anp_jax.checkpoint import trained as trained_lib
  from anp_jax.data import vocabulary

  side = config.data.image_size
  words = tuple(f'class{i:03}' for i in range(_predict_peers.CLASSES))
  images = jnp.zeros((1, side, side, 3))
  net = models.create(config, len(words), 'cpu')
  variables = dict(jax.jit(lambda key: net.init(key, images, False))(jax.random.key(0)))
  params = variables.pop('params')
  classes = vocabulary.Vocabulary(words)
  return trained_lib.Trained('', config, classes, 0, params, variables)


def _ours(side, model, dtype):
  from anp_jax import models
  from anp_jax.data.input import decode_pillow
  from anp_jax.predict import (
    __main__ as predict,
    file_batches,
    network as network_lib,
    predict_rows as rows,
  )
  from anp_jax.system import cores, onednn

  keys = {'data.image_size': str(side), 'data.resize': str(side * 8 // 7)}
  config = _common.load(keys | {'model.dtype': dtype, 'model.name': model})
  trained = _trained(config)
  table = rows.Rows(trained.vocabulary)
  network = functools.cache(lambda size: network_lib.Network(trained, _TOP, size))

  def name_files(paths, size):
    net = network(size)
    batches = file_batches.batches(
      file_batches.find(paths),
      decode_pillow.eval_decoder(config),
      net.batch_size,
      side,
      cores.count(),
    )
    predictions = []
    for batch, names in predict.named(net, batches):
      predictions += [table.file_rows(f, names, i) for i, f in enumerate(batch.files)]
    return len(predictions)

  def run(size, count):
    net = network(size)
    images = np.random.default_rng(0).integers(0, 256, (net.batch_size, side, side, 3), np.uint8)
    batch = file_batches.Batch([''] * size, images, [])
    for _ in predict.named(net, itertools.repeat(batch, count // size)):
      pass

  described = ''
  if models.target(config, 'cpu') != 'cpu':
    described = onednn.opened().describe()
  return types.SimpleNamespace(files=name_files, network=run, library=described)


def _memory(counts):
  """The most memory of the command, for few files and for many."""
  with tempfile.TemporaryDirectory() as folder:
    run = os.path.join(folder, 'run')
    keys = '--config.duration=2 steps', '--config.log.tensorboard=False'
    _common.train('--config=configs/resnet_anp.py:tiny', f'--workdir={run}', *keys)
    most = {}
    # The first run compiles, which takes more than naming does.
    for count in (10, *counts):
      images = os.path.join(folder, str(count))
      os.makedirs(images)
      _write_files(images, count, (96, 72))
      command = [sys.executable, '-m', 'anp_jax.predict', f'--checkpoint={run}', images]
      process = subprocess.Popen([*command, f'--output={images}.csv'], cwd=_common.ROOT)
      _, status, usage = os.wait4(process.pid, 0)
      if status:
        sys.exit(f'error: {" ".join(command)} failed')
      most[count] = usage.ru_maxrss / 1024
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
