"""Caffe's files of weights: read exactly, named as Caffe would, trained on, exported."""

import csv
import json
import pathlib
import tracemalloc

import jax
from jax import export as jax_export
import numpy as np
from PIL import Image
import pytest

from anp_jax import export, train
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import caffe_file, published_weights
from anp_jax.config import command_line
from anp_jax.predict import __main__ as predict
from tests import builders, caffe_models

pytest.importorskip('google.protobuf')
pytestmark = pytest.mark.usefixtures('on_one_device')

# Eight layers as CaffeNet's, small: what the reader does with them is alike.
_SMALL = {
  **{name: (2, 3, 2, 2) for name in ('conv1', 'conv2', 'conv3', 'conv4', 'conv5')},
  **{name: (1, 5) for name in ('fc6', 'fc7')},
  'fc8': (4, 5),
}


def _write(folder, arrays, **form):
  path = folder / 'x.caffemodel'
  path.write_bytes(caffe_models.net(arrays, **form))
  return str(path)


@pytest.mark.parametrize('form', ['layer', 'V1', 'V0'])
@pytest.mark.parametrize('packed, dtype', [('floats', 'f4'), ('', 'f4'), ('floats', 'f8')])
def test_every_form_of_a_file_has_the_same_tensors(tmp_path, form, packed, dtype):
  arrays = caffe_models.tensors(_SMALL)
  path = _write(tmp_path, arrays, form=form, packed=packed, dtype=dtype, last='fc8_sentibank')
  tensors, saved_config = caffe_file.read(path)
  names = [f'caffe.{name}.{leaf}' for name in _SMALL for leaf in ('weight', 'bias')]
  assert list(tensors) == names
  for name, pair in arrays.items():
    for leaf, want in zip(('weight', 'bias'), pair, strict=True):
      # The first kernel's channels are BGR in Caffe.
      want = want[:, [2, 1, 0]] if (name, leaf) == ('conv1', 'weight') else want
      np.testing.assert_array_equal(tensors[f'caffe.{name}.{leaf}'], want, name)
  assert saved_config['architecture'] == 'caffenet'


@pytest.mark.parametrize('form', ['layer', 'V1', 'V0'])
def test_a_file_tells_alexnet_by_the_order_of_its_layers(tmp_path, form):
  path = _write(tmp_path, caffe_models.tensors(_SMALL), form=form, order=('LRN', 'Pooling'))
  weights = published_weights.read(path)
  assert weights.keys['model.name'] == 'bvlc_alexnet'


def test_no_part_of_a_file_is_taken_for_the_whole(tmp_path):
  path = pathlib.Path(_write(tmp_path, caffe_models.tensors(_SMALL)))
  data = path.read_bytes()
  for size in range(len(data)):
    path.write_bytes(data[:size])
    with pytest.raises(ValueError):
      caffe_file.read(str(path))


@pytest.mark.parametrize(
  'content, words',
  [
    (b'', '0 layers with weights, expected the 8 of CaffeNet'),
    (b'\x10\x05', '0 layers with weights'),  # layers is a number, which says nothing
    (b'PK\x03\x04 an archive', 'it is no whole NetParameter of Caffe'),
    (b'\xff' * 20, 'it is no whole NetParameter'),
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n', 'git lfs pull'),
    (caffe_models.net, '7 layers with weights'),
  ],
)
def test_files_of_other_kinds_are_one_line(tmp_path, content, words, capsys):
  if callable(content):
    content = content(caffe_models.tensors(dict(list(_SMALL.items())[1:])))
  path = tmp_path / 'x_iter_250000'  # the name of DeepSentiBank's file ends so
  path.write_bytes(content)
  assert predict.main(['predict', f'--checkpoint={path}', 'x.jpg']) == 2
  line = builders.error_line(capsys)
  assert line.startswith(f"error: --checkpoint='{path}'") and words in line


@pytest.mark.parametrize(
  'name, arrays, words',
  [
    ('caffenet', _SMALL, 'caffe.conv1.bias is an array (2,) in our order of axes, expected (96,)'),
    ('bvlc_alexnet', _SMALL, "holds a caffenet, but config.model.name='bvlc_alexnet'"),
    ('resnet18', _SMALL, "holds weights of CaffeNet, but config.model.name='resnet18'"),
    ('lenet', _SMALL, "or CaffeNet, but config.model.name='lenet'; expected one of these"),
  ],
)
def test_another_network_is_refused(tmp_path, name, arrays, words):
  path = _write(tmp_path, caffe_models.tensors(arrays))
  assert words in builders.refusal(train.run, _config(path, name), str(tmp_path / 'run'))


def test_a_blob_takes_no_more_memory_than_its_file():
  """Numbers one by one, which protobuf allows, and a shape of as many axes."""
  numbers = b'\x2d\0\0\x80\x3f' * 20_000  # field 5, 1.0
  axes = bytes([1]) * 10_000
  shape = b'\x0a\x90\x4e' + axes  # field 1 of a BlobShape, packed
  blob = b'\x3a\x93\x4e' + shape + numbers  # field 7
  tracemalloc.start()
  with pytest.raises(ValueError, match=r'a blob of shape \(1, 1, .* has 80,000 bytes'):
    caffe_file._array(memoryview(blob))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2 * len(blob)


def _config(path, name='caffenet', **keys):
  """A recipe that begins with a file and takes two steps, as the command line has it."""
  overrides = {
    'model.name': name,
    'init.from': path,
    'batch_size': '8',
    'duration': '2 steps',
    'data.image_size': '227',
    'data.resize': '256',
    'data.synthetic_examples': '16',
    'eval.every': '2 steps',
    'eval.batch_size': '8',
    'checkpoint.every': '2 steps',
    'checkpoint.keep_best': '0',
    'log.tensorboard': 'False',
    **keys,
  }
  flags = command_line.main_flags(['--config=configs/resnet_anp.py:tiny'], '')
  return command_line.from_flags(flags, overrides)[0]


@pytest.fixture(scope='module')
def caffenet(tmp_path_factory):
  """A file of full size in the form of 2014, and its arrays."""
  arrays = caffe_models.tensors()
  folder = tmp_path_factory.mktemp('caffe')
  return _write(folder, arrays, form='V1', packed='bytes', last='fc8_sentibank'), arrays


def _probabilities(pixels, arrays):
  """PyTorch's, of (batch, 227, 227, 3) RGB pixels, which Caffe takes as BGR."""
  torch = pytest.importorskip('torch')
  weights = {n: tuple(map(torch.from_numpy, pair)) for n, pair in arrays.items()}
  x = pixels[..., ::-1].astype(np.float32) - np.array([104, 117, 123], np.float32)
  logits = caffe_models.logits(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), weights)
  return torch.softmax(logits, 1).numpy()


@pytest.mark.slow
def test_predict_and_export_give_the_probabilities_of_caffe(caffenet, tmp_path, capsys):
  path, arrays = caffenet
  random = np.random.default_rng(1)
  coarse = random.integers(0, 256, (3, 32, 32, 3), np.uint8)
  images = coarse.repeat(8, 1).repeat(8, 2)  # at Caffe's size: no filter resamples them
  for i, image in enumerate(images):
    Image.fromarray(image).save(tmp_path / f'{i}.png')
  names = [f'big_{i}' for i in range(7)]
  (tmp_path / 'names.txt').write_text('\n'.join(names))
  files = [str(tmp_path / f'{i}.png') for i in range(3)]
  flags = [
    f'--checkpoint={path}',
    f'--labels={tmp_path / "names.txt"}',
    '--top=7',
    '--batch_size=1',
  ]
  assert predict.main(['predict', *flags, *files]) == 0
  out = capsys.readouterr().out
  got = {
    (row['file'], row['class']): float(row['probability'])
    for row in csv.DictReader(out.splitlines())
  }
  want = _probabilities(images[:, 14:241, 14:241], arrays)
  assert want.max() < 0.9 and np.ptp(want, 0).max() > 0.01  # neither sure nor alike
  np.testing.assert_allclose([[got[f, n] for n in names] for f in files], want, atol=1e-4)
  assert published_weights.read(path).keys['data.stretch']
  assert export.main(['export', *flags[:2], f'--output={tmp_path}', '--platforms=cpu']) == 0
  program = _program(tmp_path)(images[:, 14:241, 14:241])
  np.testing.assert_allclose(program['anp'], want, atol=1e-4)
  assert json.loads((tmp_path / 'labels.json').read_text())['classes'] == names


def _program(folder):
  data = bytearray((folder / 'model.stablehlo').read_bytes())
  return jax.jit(jax_export.deserialize(data).call)


@pytest.mark.soak
def test_it_is_trained_on_and_exported(caffenet, tmp_path):
  path, _ = caffenet
  run = tmp_path / 'run'
  config = _config(path, **{'optimizer.learning_rate': '1e-6', 'model.dropout': '0.5'})
  assert (config.data.mean, config.data.std) == ((123, 117, 104), (1, 1, 1))
  train.run(config, str(run))
  text = (run / 'weights.txt').read_text()
  assert text.startswith('weights  14 loaded, 2 initialised (head/bias: (7,) there, (12,) here')
  list(export.export(str(run), str(tmp_path), ('cpu',)))
  random = np.random.default_rng(2)
  images = random.integers(0, 256, (2, 32, 32, 3), np.uint8).repeat(8, 1).repeat(8, 2)
  images = images[:, :227, :227]
  got = _program(tmp_path)(images)['anp']
  tuned = trained_lib.load(str(run)).params
  arrays = {n: (_to_caffe(layer['kernel'], n), layer['bias']) for n, layer in tuned.items()}
  want = _probabilities(images, arrays)
  assert want.max() < 0.9 and np.ptp(want, 0).max() > 0.01
  np.testing.assert_allclose(got, want, atol=1e-4)


def _to_caffe(kernel, name):
  if kernel.ndim == 2:
    return np.ascontiguousarray(kernel.T)
  kernel = kernel[:, :, ::-1] if name == 'conv1' else kernel
  return kernel.transpose(3, 2, 0, 1).copy()
