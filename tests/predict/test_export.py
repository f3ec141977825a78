"""Exported networks: loaded by transformers, run by JAX alone."""

import dataclasses
import io
import json
import os
import pathlib
import sys
import textwrap

import cv2
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
from scipy import special

from anp_jax import export
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import (
  exported as program,
  families,
  huggingface,
  naming,
  published_weights as published_lib,
  timm_folder,
)
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.input import decode_pillow
from anp_jax.models import convnext
from tests import builders, exporting, launching

_CLOTHING = launching.ROOT.parent / 'shared' / 'data' / 'clothing'
# With which its logits are of order one, and tell images apart.
_OF_EFFICIENTNET = {'data__image_size': 72, 'data__resize': 72, 'gain': 2, 'scales': (0.7, 1.3)}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, keys',
  [
    ('resnet18', {}),
    ('resnet50', {'model__version': 'v1', 'width': 8}),
    ('convnext_tiny', {}),
    ('convnextv2_atto', {}),
    # Maps of 72, 36, 18, 9 and 5 pixels, even and odd.
    ('tf_efficientnet_b0', _OF_EFFICIENTNET),
  ],
)
def test_transformers_loads_it(name, keys, tmp_path, monkeypatch):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  from tests import published  # which imports PyTorch

  tiny = (1, (1, 1, 2, 1), 8)
  monkeypatch.setitem(convnext.SIZES, 'convnext_tiny', tiny)
  trained = exporting.trained(name, **keys)
  huggingface.write(trained, tmp_path)
  network, info = transformers.AutoModelForImageClassification.from_pretrained(
    tmp_path, output_loading_info=True
  )
  assert not any(info.values()), info
  images = exporting.images(3, side=trained.config.data.image_size)
  with torch.no_grad():
    pixels = published.pixels(exporting.normalised(trained.config, images))
    want = network.eval()(pixels).logits.numpy()
  got = np.asarray(exporting.logits(trained, images))
  # Up to 53 float32 convolutions that are summed in another order.
  assert np.abs(got - want).max() <= 1e-4
  assert 0.1 < want.std() < 20 and want.std(0).max() > 0.01
  assert network.config.id2label == dict(enumerate(exporting.PAIRS.names))


@pytest.mark.slow
def test_the_processor_of_transformers_makes_the_same_pixels(tmp_path):
  transformers = pytest.importorskip('transformers')
  trained = exporting.trained(data__image_size=20, data__resize=20)
  huggingface.write(trained, tmp_path)
  processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend='pil')
  image = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)
  got = processor(image, return_tensors='np')['pixel_values'][0]
  want = exporting.normalised(trained.config, image).transpose(2, 0, 1)
  # Means and deviations over 255, in float32.
  np.testing.assert_allclose(got, want, 0, 1e-5)


@pytest.mark.parametrize('name', ['resnet18', 'convnextv2_atto', 'tf_efficientnet_b0'])
def test_it_is_read_back(name, tmp_path):
  trained = exporting.trained(name)
  huggingface.write(trained, tmp_path)
  exporting.assert_read_back(trained, tmp_path)
  weights = published_lib.read(str(tmp_path))
  assert weights.keys['model.name'] == trained.config.model.name
  assert weights.names == exporting.PAIRS.names


def test_averages_in_float64_are_written_as_float32():
  trained = exporting.trained()
  wide = jax.tree.map(lambda x: x.astype(np.float64), trained.params)
  network = trained_lib.Trained('', trained.config, exporting.PAIRS, 7, wide, trained.stats)
  tensors = families.tensors(network, naming.TRANSFORMERS)
  kinds = {n: x.dtype for n, x in tensors.items()}
  floats = {k for n, k in kinds.items() if not n.endswith('tracked')}
  assert floats == {np.dtype('float32')}


_ALONE = """
  import importlib.abc, json, sys

  class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
      if name.partition('.')[0] in ('anp_jax', 'flax', 'tensorflow', 'optax'):
        raise ImportError(name)

  sys.meta_path.insert(0, Missing())
  import numpy as np
  from jax import export

  folder, images = sys.argv[1], np.load(sys.argv[2])
  with open(folder + '/model.stablehlo', 'rb') as f:
    program = export.deserialize(f.read())
  with open(folder + '/labels.json') as f:
    labels = json.load(f)
  found = {}
  for count in (1, 8):
    for name, value in program.call(images[:count]).items():
      found[f'{name}{count}'] = np.asarray(value)
  found['best'] = np.array(labels['classes'])[found['logits8'].argmax(-1)]
  np.savez(sys.argv[2] + '.npz', **found)
"""


@pytest.mark.slow
def test_it_runs_with_jax_alone(tmp_path):
  trained = exporting.trained('tests.user_network:WithOurLayers')
  program.write(trained, tmp_path, ('cpu', 'cuda', 'tpu'))
  images = exporting.images(8)
  np.save(tmp_path / 'images.npy', images)
  options = {'folder': tmp_path, 'PYTHONPATH': ''}
  words = '-c', textwrap.dedent(_ALONE), tmp_path, tmp_path / 'images.npy'
  launching.python(*words, status=0, **options)
  outputs = dict(np.load(tmp_path / 'images.npy.npz'))
  logits = np.asarray(exporting.logits(trained, images))
  # The same operations in float32, fused otherwise: roundings of 6e-8 of
  # logits of order one, through 20 convolutions.
  for count in (1, 8):
    assert np.abs(outputs[f'logits{count}'] - logits[:count]).max() < 2e-5
  anp = special.softmax(logits.astype(np.float64), -1)
  # Pairs are old_car, red_car, shy_car, old_dog, ..: by noun, then adjective.
  table = anp.reshape(8, 2, 3)
  for name, want in (('anp', anp), ('noun', table.sum(2)), ('adjective', table.sum(1))):
    assert np.abs(outputs[f'{name}8'] - want).max() < 1e-5
  assert outputs['best'].tolist() == [exporting.PAIRS.names[i] for i in logits.argmax(-1)]
  assert outputs['anp8'].std(0).max() > 1e-3


def test_files_tell_nothing_of_the_machine_and_hold_the_weights_once(tmp_path):
  trained = exporting.trained()
  huggingface.write(trained, tmp_path)
  program.write(trained, tmp_path, ('cpu', 'cuda', 'tpu'))
  contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  exported = jax.export.deserialize(bytearray(contents[program.NAME]))
  assert exported.platforms == ('cpu', 'cuda', 'tpu')
  size = sum(x.nbytes for x in jax.tree.leaves((trained.params, trained.stats)))
  assert size < len(contents[program.NAME]) < 1.5 * size + 300_000
  root, home = str(launching.ROOT), str(pathlib.Path.home())
  places = root, home, sys.prefix, os.path.dirname(jax.__file__), os.getcwd(), '/anp_jax/', '.py'
  for name, content in contents.items():
    assert not [place for place in places if place != '/' and place.encode() in content], name
  # It is JAX's setting of the export alone.
  assert jax.config.jax_include_full_tracebacks_in_locations
  assert jax.config.jax_hlo_source_file_canonicalization_regex is None
  labels = json.loads(contents['labels.json'])
  assert labels == {
    'classes': ['old_car', 'red_car', 'shy_car', 'old_dog', 'red_dog', 'shy_dog'],
    'adjectives': ['old', 'red', 'shy'],
    'nouns': ['car', 'dog'],
    'adjective_of_class': [0, 1, 2, 0, 1, 2],
    'noun_of_class': [0, 0, 0, 1, 1, 1],
  }
  settings = json.loads(contents['preprocessing.json'])
  assert (settings['image_size'], settings['resize']) == (exporting.SIDE, 40)
  assert settings['mean'] == [123.68, 116.78, 103.94]


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['gpu', 'tpu'])
def test_what_is_lowered_for_accelerators_is_the_same_function(kind, monkeypatch):
  """Their part of the program, computed on a CPU, for any number of images."""
  monkeypatch.setitem(program.PLATFORMS, 'cpu', kind)
  trained, images = exporting.trained(), exporting.images(5)
  logits = program.exported(trained, ('cpu',)).call(images)['logits']
  # Other ways to sum the same float32 products, through 20 convolutions.
  assert np.abs(logits - np.asarray(exporting.logits(trained, images))).max() < 1e-4


@pytest.mark.parametrize('head', ['multitask', 'factored'])
def test_other_heads_give_probabilities_by_name(head):
  trained = exporting.trained('tests.user_network:WithoutDropout', model__head=head)
  assert head in huggingface.refusal(exporting.trained(model__head=head).config)
  call = program.exported(trained, ('cpu',)).call
  images = exporting.images(5)
  outputs = jax.device_get(call(images))
  expected = np.asarray(exporting.logits(trained, images), np.float64)
  if head == 'multitask':
    parts = np.split(expected, [6, 9], -1)
  else:  # adjectives, then nouns; the pair's logit is the sum of its two
    parts = np.split(expected, [3], -1)
    pairs = parts[0][:, [0, 1, 2, 0, 1, 2]] + parts[1][:, [0, 0, 0, 1, 1, 1]]
    parts = [pairs, *parts]
  for name, logits in zip(('anp', 'adjective', 'noun'), parts, strict=True):
    want = special.softmax(logits, -1)
    assert np.abs(outputs[name] - want).max() < 1e-5, name
  assert np.abs(outputs['logits'] - parts[0]).max() < 2e-5


def test_plain_classes_and_a_network_of_the_users():
  words = vocabulary_lib.Vocabulary(('a', 'b', 'c'))
  trained = exporting.trained('tests.user_network:WithoutDropout', words)
  assert 'is no ResNet or' in huggingface.refusal(trained.config)
  trained.config.model.name = 'resnet_of_mine:Net'
  assert 'is no ResNet or' in huggingface.refusal(trained.config)
  trained.config.model.name = 'tests.user_network:WithoutDropout'
  images = exporting.images(2)
  outputs = jax.device_get(program.exported(trained, ('cpu',)).call(images))
  assert set(outputs) == {'logits', 'anp'}
  want = np.asarray(exporting.logits(trained, images))
  assert np.abs(outputs['logits'] - want).max() < 1e-5


def test_bfloat16_is_computed_as_in_evaluation():
  trained = exporting.trained('tests.user_network:WithoutDropout', model__dtype='bfloat16')
  images = exporting.images(2)
  outputs = jax.device_get(program.exported(trained, ('cpu',)).call(images))
  pixels = jnp.asarray(exporting.normalised(trained.config, images), jnp.bfloat16)
  variables = {'params': trained.params, **trained.stats}
  want = trained.model('cpu').apply(variables, pixels, False)
  assert outputs['logits'].dtype == np.float32
  # bfloat16 has 8 bits, of logits of order one; fused otherwise.
  assert np.abs(outputs['logits'] - want).max() < 0.02


# Images prepared as the files say, by somebody who has Pillow, OpenCV and NumPy.


def _triangle(size, side):
  """(side, size): what each pixel is of each result, along one axis."""
  scale = size / side
  centre = (np.arange(side)[:, None] + 0.5) * scale - 0.5
  shares = np.maximum(1 - np.abs(np.arange(size) - centre) / max(scale, 1), 0)
  return shares / shares.sum(1, keepdims=True)


def _prepared(file, settings):
  """(side, side, 3) uint8, as preprocessing.json has it."""
  side, resize, decode = (settings[key] for key in ('image_size', 'resize', 'decode'))
  image = Image.open(io.BytesIO(file))
  if decode in ('bilinear', 'bicubic'):
    sides = [resize * n // min(image.size) for n in image.size]
    if settings['crop'].startswith('both sides are brought to resize'):
      sides = [resize, resize]
    left, top = ((n - side) // 2 for n in sides)
    image = image.convert('RGB').resize(sides, getattr(Image, decode.upper()))
    return np.asarray(image.crop((left, top, left + side, top + side)))
  square = round(min(image.size) * side / resize)
  left, top = ((n - square) // 2 for n in image.size)
  if 'jpeg' in settings:
    times = max(t for t in (1, 2, 4, 8) if t == 1 or square >= t * side)
    image.draft(None, [n // times for n in image.size])
    left, top, square = left // times, top // times, square // times
  pixels = np.asarray(image.convert('RGB'))[top : top + square, left : left + square]
  if decode == 'fast':
    how = cv2.INTER_AREA if square >= 2 * side else cv2.INTER_LINEAR
    return cv2.resize(pixels, (side, side), interpolation=how)
  shares = _triangle(square, side)
  rows = np.tensordot(shares, pixels.astype(float), 1)
  resized = np.moveaxis(np.tensordot(shares, rows, (1, 1)), 0, 1)
  return np.floor(resized + 0.5)


@pytest.mark.parametrize(
  'decode, stretch',
  [('fast', False), ('exact', False), ('bilinear', False), ('bilinear', True), ('bicubic', False)],
)
def test_preprocessing_is_that_of_the_evaluation(decode, stretch):
  config = builders.load('configs/resnet_anp.py:tiny')
  config.data.image_size, config.data.resize = exporting.SIDE, 40
  config.data.decode, config.data.stretch = decode, stretch
  settings = program.preprocessing(config)
  random = np.random.default_rng(0)
  read = decode_pillow.eval_decoder(config)
  for size in ((30, 36), (90, 171), (530, 390)):
    shape = (size[1] // 9 + 2, size[0] // 9 + 2, 3)
    image = Image.fromarray(random.integers(0, 256, shape, np.uint8))
    file = builders.encode_image(image.resize(size, Image.Resampling.BICUBIC), 'JPEG')
    gaps = np.abs(_prepared(file, settings).astype(int) - read(file))
    # float64 here, and Pillow takes a box in float32: ties are rounded apart.
    assert gaps.max() <= (3 if decode == 'bicubic' else 1), size
    assert gaps.mean() < 0.25, size


def test_libraries_stretch_as_the_evaluation_does():
  transformers = pytest.importorskip('transformers')
  trained = exporting.trained(data__decode='bicubic', data__stretch=True)
  settings = huggingface.preprocessor(trained.config)
  processor = getattr(transformers, settings.pop('image_processor_type'))(**settings)
  image = Image.fromarray(builders.random_pixels(9, 17)).resize((170, 90))
  got = processor(image, return_tensors='np')['pixel_values'][0].transpose(1, 2, 0)
  pixels = decode_pillow.eval_decoder(trained.config)(builders.encode_image(image))
  want = exporting.normalised(trained.config, pixels)
  # Pillow takes a box in float32: some values are rounded the other way, by up to 3 levels.
  assert np.abs(got - want).max() <= 3.1 / min(trained.config.data.std)
  # timm's transforms_factory: both sides are brought to the size before the crop.
  assert timm_folder.architecture(trained)['pretrained_cfg']['crop_mode'] == 'squash'


def test_preprocessing_of_what_is_no_file():
  config = builders.load('configs/resnet_anp.py:tiny', {})
  config.data.source = 'digits'
  settings = program.preprocessing(config)
  assert settings['decode'] == 'fast pixels' and 'jpeg' not in settings
  config.data.source, config.data.cache = 'anp_shapes', 'mapped'
  assert 'shrink' in program.preprocessing(config)


@pytest.mark.slow
@pytest.mark.parametrize('decode', ['fast', 'bicubic'])
def test_fifty_photographs_have_the_same_probabilities(decode, tmp_path):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  photographs = sorted(_CLOTHING.glob('test/*/*.jpg'))[:350:7]
  if not photographs:
    pytest.skip(f'{_CLOTHING} is not here')
  files = [path.read_bytes() for path in photographs]
  trained = exporting.trained(width=8, data__decode=decode)
  read = decode_pillow.eval_decoder(trained.config)
  logits = exporting.logits(trained, np.stack([read(file) for file in files]))
  # As sure as a trained network is: logits of its head spread by 2.
  head = trained.params['head']
  head['kernel'] = head['kernel'] * (2 / np.std(logits, 0).mean())
  logits = exporting.logits(trained, np.stack([read(file) for file in files]))
  head['bias'] = head['bias'] - np.mean(logits, 0)
  ours = np.asarray(jax.nn.softmax(logits - np.mean(logits, 0)))
  assert len(set(ours.argmax(1))) > 3

  # The program, with preprocessing.json.
  program.write(trained, tmp_path, ('cpu',))
  settings = json.loads((tmp_path / 'preprocessing.json').read_text())
  images = np.stack([_prepared(file, settings) for file in files])
  call = jax.export.deserialize((tmp_path / program.NAME).read_bytes()).call
  np.testing.assert_allclose(call(images.astype(np.uint8))['anp'], ours, atol=1e-3)

  # transformers, with preprocessor_config.json.
  huggingface.write(trained, tmp_path)
  network = transformers.ResNetForImageClassification.from_pretrained(tmp_path)
  prepare = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend='pil')
  opened = [Image.open(path) for path in photographs]
  with torch.no_grad():
    pixels = prepare(opened, return_tensors='pt')['pixel_values']
    expected = network.eval()(pixels).logits.softmax(-1).numpy()
  gaps = np.abs(expected - ours).max(1)
  if huggingface.is_approximate(trained.config):
    # It resizes before it crops, and has neither mean nor smaller scale.
    assert gaps.mean() < 0.1
  else:
    assert gaps.max() < 1e-3
    assert expected.argmax(1).tolist() == ours.argmax(1).tolist()
  print(f'{decode}: {gaps.mean():.5f} in the mean, {gaps.max():.5f} at most')


# The command.


@pytest.mark.parametrize('decode, is_near', [('fast', True), ('bicubic', False)])
def test_a_processor_that_is_only_near_is_said(decode, is_near, tmp_path):
  trained = exporting.trained(data__decode=decode)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trained_lib, 'load', lambda *_: trained)
    patch.setattr(program, 'write', lambda *_: [])
    lines = list(export.export('it', str(tmp_path), ('cpu',)))
  near = [line for line in lines if 'approximates the evaluation' in line]
  assert len(near) == is_near and all("'fast'" in line for line in near)
  settings = json.loads((tmp_path / 'preprocessor_config.json').read_text())
  assert settings['resample'] == (2 if is_near else 3)  # as Pillow numbers them
  assert lines[0] == 'nowhere: resnet18, 6 classes, step 7'


def test_preprocessing_that_is_only_near_is_said_of_timm_too(tmp_path, monkeypatch):
  trained = exporting.trained('tf_efficientnet_lite0')
  monkeypatch.setattr(trained_lib, 'load', lambda *_: trained)
  monkeypatch.setattr(program, 'write', lambda *_: [])
  lines = list(export.export('it', str(tmp_path), ('cpu',)))
  assert "config.json approximates the evaluation of this run (data.decode='fast')" in lines[-2]


def test_files_of_another_network_are_not_left_beside(tmp_path, monkeypatch):
  trained = exporting.trained(model__head='factored')
  monkeypatch.setattr(trained_lib, 'load', lambda *_: trained)
  (tmp_path / 'config.json').write_text('{}')
  builders.assert_refused(
    'config.json of another', list, export.export('it', str(tmp_path), ('cpu',))
  )


@pytest.mark.parametrize(
  'path, source',
  [
    ('config.json', 'nowhere'),  # of a run without checkpoints yet
    ('checkpoints/3/state/x', 'nowhere'),
    ('model.safetensors', 'model.safetensors'),
    ('state/x', ''),
  ],
)
def test_a_run_and_the_exported_weights_are_not_written_over(path, source, tmp_path, monkeypatch):
  trained = dataclasses.replace(exporting.trained(), folder=str(tmp_path / source))
  monkeypatch.setattr(trained_lib, 'load', lambda *_: trained)
  before = {path: b'{"strategy.name": "sync"}'}
  builders.write_tree(tmp_path, before)
  words = [f'--output={str(tmp_path)!r} is the folder of a run or of these weights']
  builders.assert_refused(words, list, export.export('it', str(tmp_path), ('cpu',)))
  assert builders.read_tree(tmp_path) == before


@pytest.mark.slow
def test_command_on_a_run(tmp_path, capsys, config):
  config.model.name = 'tests.user_network:WithoutDropout'
  config.duration, config.log.tensorboard = '2 steps', False
  builders.train_alone(config, tmp_path / 'run')
  capsys.readouterr()
  flags = [f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/out', '--platforms=cpu']
  assert export.main(['', *flags]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[-1] == 'model.stablehlo is for cpu; any number of images'
  assert lines[0].endswith('WithoutDropout, 12 classes, step 2')
  assert lines[1].startswith('nothing for transformers: ')
  written = {line.partition('  ')[0] for line in lines if line.startswith(f'{tmp_path}/out/')}
  names = ('labels.json', 'model.stablehlo', 'preprocessing.json')
  assert written == {f'{tmp_path}/out/{name}' for name in names}


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], ('--checkpoint=DIR is missing',)),
    (['--checkpoint=x'], ('--output=DIR is missing',)),
    (['--checkpoint=x', '--output=y', '--platforms=cpu,cudda'], ("'cudda'", "did you mean 'cuda'")),
    (['--checkpoint=/nowhere', '--output=y'], ('/nowhere', 'expected')),
  ],
)
def test_bad_input_is_one_line(arguments, words, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert export.main(['', *arguments]) == 2
  builders.error_line(capsys, *words)
  assert not os.listdir(tmp_path)
