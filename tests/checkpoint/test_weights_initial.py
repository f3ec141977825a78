"""What a new run begins with: loaded, initialised, unused, refused."""

import functools
import json
import os
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from anp_jax import config as config_lib, train
from anp_jax.checkpoint import trained
from anp_jax.checkpoint.weights import families, initial, naming, weights_source
from anp_jax.config import trust
from anp_jax.data import vocabulary as vocabulary_lib
from tests import builders, launching, programs, serving

_WORDS = vocabulary_lib.Vocabulary(tuple(f'class_{i}' for i in range(10)))
_WIDTH, _CLASSES = 4, 10


def _config(**keys):
  recipe = builders.load('configs/resnet_anp.py:tiny')
  recipe.update_from_flattened_dict(
    {
      'log.tensorboard': False,
      'model.width': _WIDTH,  # of a ResNet
      **{key.replace('__', '.'): value for key, value in keys.items()},
    }
  )
  return builders.editable(config_lib.resolved(recipe))


def _program(config, devices=1, words=_WORDS):
  return programs.build(config, devices, words.names)


@functools.cache
def _resnet18():
  return _program(_config())


def _load(config, folder='', program=None, words=_WORDS):
  program = program or _resnet18()
  arrays, lines = initial.load(config, program, words, str(folder))
  return program, arrays, lines


def _abstract(program):
  """The tensors of a network, by our names."""
  replica = program.abstract_replica
  return initial.flat({'params': replica.params, **replica.stats})


def _file(folder, change=lambda tensors: None, kind=naming.TIMM, dtype=np.float32, prefix=''):
  """A file of made-up weights, and those by our names."""
  random = np.random.default_rng(0)
  want, tensors = {}, {}
  for name, leaf in _abstract(_resnet18()).items():
    shape = leaf.shape
    value = random.uniform(0.5, 1.5, shape).astype(dtype)
    want[name] = value.astype(np.float32)
    file_name = families.RESNET.namings[kind].published(name, prefix)
    tensors[file_name] = np.ascontiguousarray(families.RESNET.to_published(name, value, kind))
    if file_name.endswith('running_var'):
      count = file_name.replace('running_var', naming.UNUSED)
      tensors[count] = np.array(7)
  change(tensors)
  path = os.path.join(folder, 'x.safetensors')
  safetensors_numpy.save_file(tensors, path)
  return path, want


def _variables(state, select=lambda x: x):
  tree = {'params': state.params, **state.stats}
  return {n: np.asarray(select(x)) for n, x in initial.flat(tree).items()}


@pytest.mark.parametrize(
  'kind, dtype, prefix',
  [
    (naming.TIMM, np.float32, ''),
    (naming.TRANSFORMERS, np.float16, 'resnet.'),
    (naming.TRANSFORMERS, ml_dtypes.bfloat16, ''),
  ],
)
def test_every_tensor_of_a_file_is_loaded(tmp_path, kind, dtype, prefix):
  path, want = _file(tmp_path, kind=kind, dtype=dtype, prefix=prefix)
  config = _config(init__from=path)
  _, arrays, lines = _load(config, tmp_path)
  assert arrays.keys() == want.keys()
  for name, value in want.items():  # to the bit: half floats widen exactly
    assert arrays[name].dtype == np.float32
    np.testing.assert_array_equal(arrays[name], value, name)
  assert lines == [f'weights  {len(want)} loaded, 0 initialised, 0 unused of {path}']
  text = (tmp_path / 'weights.txt').read_text().splitlines()
  assert text[0] == lines[0] and len(text) == 1 + len(want)
  file_name = families.RESNET.namings[kind].published('params/stem_conv/kernel', prefix)
  assert f'loaded       params/stem_conv/kernel (7, 7, 3, 4)  {file_name}' in text


def test_averages_begin_with_the_weights(averaged):
  config = _user_config(init__from=str(averaged), ema=0.9)
  words = trained.load(str(averaged)).vocabulary
  program, arrays, _ = _load(config, program=_program(config, words=words), words=words)
  state = program.new_state(arrays)
  params, stats = state.evaluated()
  assert params is not state.params
  jax.tree.map(np.testing.assert_array_equal, params, state.params)
  jax.tree.map(np.testing.assert_array_equal, stats, state.stats)
  for name, value in _variables(state).items():
    np.testing.assert_array_equal(value, arrays[name], name)


@pytest.mark.slow
def test_a_classifier_of_another_size_starts_at_random(tmp_path):
  def change(tensors):
    tensors['fc.weight'] = np.ones((1000, 32), np.float32)
    tensors['fc.bias'] = np.ones(1000, np.float32)
    tensors['aux.weight'] = np.ones(3, np.float32)

  path, want = _file(tmp_path, change)
  program, arrays, lines = _load(_config(init__from=path), tmp_path)
  heads = {'params/head/kernel', 'params/head/bias'}
  assert set(arrays) == set(want) - heads
  assert lines == [
    f'weights  {len(arrays)} loaded, 2 initialised (head/bias: (1000,) there, '
    '(10,) here; head/kernel: (32, 1000) there, (32, 10) here), 1 unused of '
    f'{path}'
  ]
  assert 'unused       aux.weight' in (tmp_path / 'weights.txt').read_text()
  random = program.new_state()
  got = _variables(program.new_state(arrays))
  for name, value in _variables(random).items():
    same = np.array_equal(got[name], value)
    assert same == (name in heads)


def test_the_classifier_of_a_backbone_starts_at_random(tmp_path):
  def change(tensors):
    del tensors['classifier.1.weight'], tensors['classifier.1.bias']

  path, want = _file(tmp_path, change, naming.TRANSFORMERS, prefix='')
  _, arrays, (line,) = _load(_config(init__from=path))
  assert set(want) - set(arrays) == {'params/head/kernel', 'params/head/bias'}
  assert '(head/bias: none there; head/kernel: none there)' in line


@pytest.mark.slow
@pytest.mark.parametrize(
  'change, words',
  [
    (
      lambda t: t.pop('layer2.0.bn1.weight'),
      ('has no layer2.0.bn1.weight', '2, 2, 2, 2 blocks of 2 convolutions'),
    ),
    (
      lambda t: t.update({'layer3.1.se.weight': np.ones(2, np.float32)}),
      ('has layer3.1.se.weight too',),
    ),
    (
      lambda t: t.update({'conv1.weight': np.ones((4, 1, 7, 7), np.float32)}),
      ('conv1.weight', '(7, 7, 1, 4)', '(7, 7, 3, 4)', 'params/stem_conv'),
    ),
    (lambda t: t.update({'bn1.bias': np.ones(4, np.int32)}), ('bn1.bias is int32', 'floating')),
    (
      lambda t: [t.pop(n) for n in list(t) if n != 'fc.weight'],
      ('torchvision and timm', 'transformers', 'fc.weight'),
    ),
  ],
)
def test_tensors_that_do_not_fit_are_one_line(tmp_path, change, words):
  path, _ = _file(tmp_path, change)
  _refused(_config(init__from=path), (*words, repr(path)))


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, words',
  [
    ('resnet34', ('has no layer1.2.', '2, 2, 2, 2 blocks', '3, 4, 6, 3 blocks')),
    ('resnet50', ('has no layer1.0.bn3.bias', 'resnet50', 'blocks of 3 convolutions')),
    ('lenet', ("'lenet'", 'a ResNet or')),
  ],
)
def test_a_network_that_does_not_fit_is_one_line(tmp_path, name, words):
  path, _ = _file(tmp_path)
  config = _config(init__from=path, model__name=name)
  _refused(config, (*words, repr(path)), _program(config))


def _refused(config, words, program=None):
  builders.assert_refused(('config.init.from', *words), _load, config, program=program)


def test_files_that_cannot_be_read(tmp_path):
  path = tmp_path / 'x.safetensors'
  _refused(_config(init__from=str(path)), ('there is none', str(path)))
  path.write_bytes(b'not what it says it is')
  _refused(_config(init__from=str(path)), ('cannot be read', str(path)))
  path = tmp_path / 'x.pth'
  path.write_bytes(b'')
  _refused(_config(init__from=str(path)), ('cannot be read', 'PyTorch', str(path)))


@pytest.mark.slow
@pytest.mark.parametrize(
  'saved_config, version, fits',
  [
    ({'downsample_in_bottleneck': True}, 'v1', True),
    ({'downsample_in_bottleneck': True}, 'v1.5', False),
    ({}, 'v1', False),
    ({}, 'v1.5', True),
  ],
)
def test_the_version_is_that_of_transformers_config(tmp_path, saved_config, version, fits):
  """Both have tensors of the same names and shapes."""
  config = _config(init__from=str(tmp_path), model__name='resnet50', model__version=version)
  program = _program(config)
  tensors = {
    families.RESNET.namings[naming.TRANSFORMERS].published(n): np.ascontiguousarray(
      families.RESNET.to_published(n, np.ones(x.shape, np.float32), naming.TRANSFORMERS)
    )
    for n, x in _abstract(program).items()
  }
  safetensors_numpy.save_file(tensors, tmp_path / 'model.safetensors')
  saved_config = {'model_type': 'resnet', 'layer_type': 'bottleneck', **saved_config}
  (tmp_path / 'config.json').write_text(json.dumps(saved_config))
  if fits:
    assert len(_load(config, program=program)[1]) == len(tensors)
  else:
    other = 'v1' if version == 'v1.5' else 'v1.5'
    _refused(config, (repr(other), f'model.version={version!r}'), program)


@pytest.mark.slow
def test_divided_parameters(tmp_path):
  path, want = _file(tmp_path)
  config = _config(init__from=path, sharding=(('.*', 'fsdp'),), batch_size=64)
  program, arrays, _ = _load(config, program=_program(config, 4))
  state = program.new_state(arrays)
  kernel = state.params['stage4_block1']['conv1']['kernel']
  shard = kernel.addressable_shards[0].data
  assert shard.size * 4 == kernel.size
  for name, value in _variables(state).items():
    np.testing.assert_array_equal(value, want[name], name)


@pytest.mark.slow
def test_all_groups_begin_with_the_weights(averaged):
  keys = {'strategy__name': 'local_sgd', 'strategy__groups': 4, 'batch_size': 64}
  config = _user_config(init__from=str(averaged), **keys)
  words = trained.load(str(averaged)).vocabulary
  program, want, _ = _load(config, program=_program(config, 2, words), words=words)
  state = program.new_state(want)
  for group in range(4):
    got = _variables(state, lambda x, i=group: x[i])
    for name, value in want.items():
      np.testing.assert_array_equal(got[name], value, name)


def test_the_classifier_is_found_in_any_network():
  names, words = {}, vocabulary_lib.Vocabulary(tuple('abcdefg'))
  for name in ('resnet18', 'lenet', 'tests.user_network:SmallNet'):
    names[name] = initial.classifier(_config(model__name=name), words)
  head = {'params/head/kernel', 'params/head/bias'}
  assert names == dict.fromkeys(names, head)


# A run of another network, and what begins with it.


def _user_config(**keys):
  return _config(model__name='tests.user_network:WithoutDropout', duration='2 steps', **keys)


@pytest.mark.slow
def test_a_run_begins_with_anothers_weights(averaged, tmp_path, capsys):
  source = tmp_path / 'source'
  shutil.copytree(averaged, source)
  best = str(source / 'best')
  # A rate of 0: what it ends with is what it began with.
  config = _user_config(init__from=best, optimizer__learning_rate=0.0)
  builders.train_alone(config, tmp_path / 'run')
  want, got = trained.load(best), trained.load(str(tmp_path / 'run'))
  jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
  assert '10 loaded, 0 initialised, 0 unused' in capsys.readouterr().out
  assert (tmp_path / 'run' / 'weights.txt').exists()
  # A run that goes on reads its own checkpoint.
  shutil.rmtree(source)
  config.duration = '3 steps'
  builders.train_alone(config, tmp_path / 'run')
  assert trained.load(str(tmp_path / 'run')).step == 3
  assert 'loaded' not in capsys.readouterr().out
  builders.assert_refused('config.init.from', builders.train_alone, config, tmp_path / 'another')


def test_the_same_number_of_other_classes_is_another_classifier(averaged):
  trained_words = trained.load(str(averaged)).vocabulary
  names = tuple(f'other_{i}' for i in range(len(trained_words)))
  config = _user_config(init__from=str(averaged))
  for words, initialised in ((trained_words, 0), (vocabulary_lib.Vocabulary(names), 2)):
    _, arrays, (line,) = _load(config, program=_program(config, words=words), words=words)
    assert len(arrays) == 10 - initialised
    assert f'{initialised} initialised' in line
    assert ('its outputs are others' in line) == bool(initialised)


def test_another_network_is_refused(averaged):
  config = _config(init__from=str(averaged))
  _refused(config, ("'tests.user_network:WithoutDropout'", "'resnet18'"))


@pytest.mark.slow
def test_a_server_begins_with_the_weights(averaged, tmp_path):
  config = serving.config_of(_user_config(init__from=str(averaged), optimizer__learning_rate=0.0))
  with pytest.MonkeyPatch.context() as patch:
    serving.on_devices(patch, 1)
    serving.run(config, tmp_path)
  want, got = trained.load(str(averaged)), trained.load(str(tmp_path))
  jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


@pytest.mark.slow
def test_models_of_a_ring_begin_with_their_own_weights(averaged, tmp_path):
  config = _user_config(
    init__from=str(averaged),
    optimizer__learning_rate=0.0,
    strategy__name='model_ring',
    eval__every='1 epochs',
    strategy__models=('seed=1', 'seed=1; init.from='),
  )
  config.duration = '1 epochs'
  with pytest.MonkeyPatch.context() as patch:
    serving.on_devices(patch, 1)
    train.run(config, str(tmp_path))
  want = trained.load(str(averaged))
  loaded, random = (trained.load(str(tmp_path / 'models' / f'{i:03}')) for i in range(2))
  jax.tree.map(np.testing.assert_array_equal, loaded.params, want.params)
  kernels = [t.params['conv1']['kernel'] for t in (want, random)]
  assert not np.array_equal(*kernels)


@pytest.mark.soak
@pytest.mark.multiprocess
def test_processes_begin_with_the_weights(tmp_path):
  source, run = tmp_path / 'source', tmp_path / 'run'
  keys = {'duration': '2 steps', 'eval.every': '2 steps'}
  launching.run(tmp_path, 1, launching.arguments(source, **keys))
  keys |= {'init.from': source, 'optimizer.learning_rate': 0.0, 'sharding': "(('.*','fsdp'),)"}
  launching.run(tmp_path, 2, launching.arguments(run, **keys), devices=2)
  trust.allow({'model.name': 'tests.user_network:PlainNet'})
  want, got = trained.load(str(source)), trained.load(str(run))
  jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
  # All end where there is nothing, none waits for another.
  keys['init.from'] = tmp_path / 'nowhere'
  arguments = launching.arguments(tmp_path / 'other', **keys)
  with launching.Ranks(tmp_path, 2, arguments) as ranks:
    assert ranks.wait() == [2, 2]
    for rank in range(2):
      assert 'there is none' in ranks.text(rank)


def test_outputs_of_a_head_of_ones_own_are_those_of_the_same_head():
  vocabulary = vocabulary_lib.Vocabulary(('old_dog', 'big_cat'))
  config = builders.editable(builders.load('configs/lenet.py', {}))
  joint = weights_source.outputs(config, vocabulary)
  config.model.head = 'tests.user_training:Hinge'
  hinge = weights_source.outputs(config, vocabulary)
  assert hinge == weights_source.outputs(config, vocabulary) != joint
