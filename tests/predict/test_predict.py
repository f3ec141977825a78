"""Tests of predict: files named from the command line, as evaluation would."""

import csv
import dataclasses
import io
import json
import os
import pathlib
import sys

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
from scipy import special

from anp_jax import config as config_lib
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.config import command_line
from anp_jax.data import vocabulary
from anp_jax.data.input import decode_pillow
from anp_jax.data.sources import features
from anp_jax.predict import __main__ as predict, network as network_lib, sheet
from anp_jax.reporting import telemetry
from tests import builders, exporting, launching

_PAIRS = ('big_cat', 'big_dog', 'old_cat', 'old_dog', 'red_car')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A trained run on JPEG files: (workdir, folder of the validation split)."""
  root = tmp_path_factory.mktemp('run')
  rng = np.random.default_rng(0)
  for i, name in enumerate(_PAIRS):
    for split, count in (('train', 12), ('validation', 8 + i)):
      folder = root / 'tree' / split / name
      folder.mkdir(parents=True)
      for k in range(count):
        tone = np.array([40 * i, 200 - 40 * i, 90], float)
        noise = rng.normal(0, 60, (12, 12, 3))
        coarse = np.clip(tone + noise, 0, 255).astype(np.uint8)
        size = (40 + 9 * k, 30 + 11 * i)
        picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        picture.save(folder / f'{k}.jpg')
  config = command_line.load(
    str(launching.ROOT / 'configs' / 'resnet_anp.py:tiny'),
    {
      'model.name': 'tests.user_network:PlainNet',
      'data.source': 'folder',
      'data.path': str(root / 'tree'),
      'data.image_size': '16',
      'data.resize': '18',
      'batch_size': '8',
      'duration': '60 steps',
      'optimizer.learning_rate': '0.1',
      'log.tensorboard': 'False',
      'checkpoint.every': '60 steps',
      'eval.every': '60 steps',
    },
  )
  builders.train_alone(config, root / 'run')
  return root / 'run', root / 'tree' / 'validation'


def _main(*arguments):
  return predict.main(['predict', *(str(a) for a in arguments)])


def _named(capfd, *arguments, status=0):
  """Rows as dicts of text, and the lines of standard error."""
  assert _main(*arguments) == status
  out, err = capfd.readouterr()
  return list(csv.DictReader(io.StringIO(out))), err.splitlines()


def _by_hand(trained, paths):
  """The decoder, and probabilities (files, pairs) of the network alone."""
  read = decode_pillow.eval_decoder(trained.config)
  images = np.stack([read(pathlib.Path(p).read_bytes()) for p in paths])
  return read, special.softmax(np.float64(exporting.logits(trained, images)), 1)


# What evaluation sees.


@pytest.mark.slow
def test_top1_count_is_that_of_the_evaluation(run, capfd):
  workdir, tree = run
  records, err = _named(capfd, f'--checkpoint={workdir}', tree, '--top=5')
  best = [row for row in records if row['rank'] == '1']
  assert len(best) == 50 == len({row['file'] for row in records})
  scores = telemetry.of_kind(str(workdir), 'validation')[-1]
  hits = sum(row['anp'] == pathlib.Path(row['file']).parent.name for row in best)
  assert hits == round(scores['anp_top1'] * scores['examples'])
  assert 10 < hits < 50  # it learned something, and is not always right
  # The loss that evaluation reports is of the same probabilities.
  probabilities = [
    float(row['probability'])
    for row in records
    if row['anp'] == pathlib.Path(row['file']).parent.name
  ]
  # Written with five digits.
  assert -np.log(probabilities).mean() == pytest.approx(scores['loss'], rel=1e-4)
  assert err[-1].startswith('50 named in ')


def test_features_are_what_the_classifier_reads(run, tmp_path, capfd):
  """Written for photographs in batches; `data.sources.features` reads them."""
  workdir, tree = run
  path = tmp_path / 'x.npz'
  paths = tree, tree / 'old_dog'  # some come twice
  _named(capfd, f'--checkpoint={workdir}', *paths, f'--features={path}', '--batch_size=8')
  names, values = features.read(str(path))
  assert list(names) == sorted(str(p) for p in tree.rglob('*.jpg'))
  trained = trained_lib.load(str(workdir))
  head = trained.params['head']
  _, shares = _by_hand(trained, names)
  logits = values @ head['kernel'] + head['bias']
  # float32 sums of eight terms.
  np.testing.assert_allclose(special.softmax(logits, 1), shares, rtol=1e-4)
  np.testing.assert_allclose(features.read(str(path), 'logits')[1], logits, rtol=1e-4, atol=1e-5)
  assert _main(f'--checkpoint={workdir}', tree, f'--features={tmp_path}/x.csv') == 2
  assert 'x.csv' in capfd.readouterr().err


def test_features_are_of_all_files_though_nobody_reads_the_table(run, tmp_path, monkeypatch):
  workdir, tree = run
  reader, writer = os.pipe()
  os.close(reader)
  with open(writer, 'w') as stdout:
    monkeypatch.setattr(sys, 'stdout', stdout)
    path = tmp_path / 'x.npz'
    assert _main(f'--checkpoint={workdir}', tree, f'--features={path}', '--batch_size=8') == 0
  assert len(features.read(str(path))[0]) == 50


def test_a_terminal_obeys_no_name_of_a_file(run, tmp_path, monkeypatch, capfd):
  workdir, tree = run
  photo = tmp_path / 'a\x1b[31m\n.jpg'
  photo.write_bytes((tree / 'old_dog' / '0.jpg').read_bytes())
  flags = f'--checkpoint={workdir}', photo, '--top=1'
  for is_terminal, name in ((False, str(photo)), (True, rf'{tmp_path}/a\x1b[31m\n.jpg')):
    monkeypatch.setattr(type(sys.stdout), 'isatty', lambda _, answer=is_terminal: answer)
    assert _named(capfd, *flags)[0][0]['file'] == name
  assert _main(*flags, f'--output={tmp_path}/x.csv') == 0
  assert builders.rows(tmp_path / 'x.csv')[0]['file'] == str(photo)


def test_features_of_a_bfloat16_network_are_float32(run):
  trained = trained_lib.load(str(run[0]))
  config = config_lib.replaced(trained.config, {'model.dtype': 'bfloat16'})
  network = network_lib.Network(dataclasses.replace(trained, config=config), 1, 8, True)
  images = np.zeros((network.batch_size, 16, 16, 3), np.uint8)
  names = network.names(network.start(images), 8)
  assert {a.dtype for a in names.arrays.values()} == {np.dtype('float32')}


def test_words_are_sums_over_their_pairs(run, capfd):
  """Probabilities add up to 1; those of words are sums, for head joint."""
  workdir, tree = run
  flags = (f'--checkpoint={workdir}', tree / 'old_dog', '--top=9', '--explain')
  records, _ = _named(capfd, *flags)
  assert len(records) == 5 * 11
  for start in range(0, len(records), 5):
    file_rows = records[start : start + 5]
    assert [row['rank'] for row in file_rows] == list('12345')
    pairs = {row['anp']: float(row['probability']) for row in file_rows}
    assert sorted(pairs.values(), reverse=True) == list(pairs.values())
    assert sum(pairs.values()) == pytest.approx(1, abs=1e-4)
    for part, place in (('adjective', 0), ('noun', 1)):
      sums = {}
      for name, value in pairs.items():
        word = name.split('_')[place]
        sums[word] = sums.get(word, 0) + value
      ranked = sorted(sums, key=sums.get, reverse=True)
      got = [row[f'best_{part}'] for row in file_rows]
      assert got == ranked + [''] * (5 - len(ranked))
      for row in file_rows:
        assert row[part] == row['anp'].split('_')[place]
        got = float(row[f'{part}_probability'])
        assert got == pytest.approx(sums[row[part]], rel=1e-3)
      for row, word in zip(file_rows, ranked):
        got = float(row[f'best_{part}_probability'])
        assert got == pytest.approx(sums[word], rel=1e-3)


@pytest.mark.parametrize('devices', [1, 8])
def test_names_stand_beside_their_files_over_several_batches(
  run, tmp_path, capfd, monkeypatch, devices
):
  workdir, tree = run
  chosen = jax.devices()[:devices]
  monkeypatch.setattr(jax, 'local_devices', lambda: chosen)
  (tmp_path / 'text.jpg').write_text('no image')
  paths = sorted(str(p) for p in tree.glob('*/*.jpg'))[::-1]
  paths.insert(20, str(tmp_path / 'text.jpg'))
  records, err = _named(capfd, f'--checkpoint={workdir}', *paths, '--top=1', '--batch_size=16')
  del paths[20]
  assert [row['file'] for row in records] == paths and len(paths) == 50
  assert len(err) == 2 and err[0].startswith('unreadable: ')
  _, shares = _by_hand(trained_lib.load(str(workdir)), paths)
  assert [row['anp'] for row in records] == [_PAIRS[i] for i in shares.argmax(1)]
  # Written with five digits.
  np.testing.assert_allclose(
    [float(row['probability']) for row in records], shares.max(1), rtol=1e-4
  )


# What is read.


def test_unreadable_files_are_listed_and_do_not_stop_it(run, tmp_path, capfd):
  workdir, tree = run
  good = tree / 'big_cat' / '1.jpg'
  (tmp_path / 'cut.jpg').write_bytes(good.read_bytes()[:400])
  (tmp_path / 'text.png').write_text('no image')
  builders.write_tree(tmp_path / 'empty', {'x.svg': '<svg/>'})
  os.mkfifo(tmp_path / 'pipe.jpg')
  paths = [
    tmp_path / 'gone.jpg',
    good,
    tmp_path / 'cut.jpg',
    tmp_path / 'text.png',
    tmp_path / 'empty',
    tmp_path / 'pipe.jpg',
    good,
  ]
  records, err = _named(capfd, f'--checkpoint={workdir}', *paths, '--top=1')
  assert [row['file'] for row in records] == [str(good)] * 2
  assert records[0]['anp'] == records[1]['anp']
  reasons = 'no such file|truncated|not an image|without image files|neither a file nor a folder'
  for line, path, reason in zip(err, [paths[0], *paths[2:6]], reasons.split('|')):
    assert line.startswith(f'unreadable: {path}: ')
    assert reason in line.lower(), line
  assert err[5] == f'left out: 1 .svg (first {tmp_path}/empty/x.svg)'
  assert err[-1].endswith(', 5 unreadable') and len(err) == 7
  records, err = _named(capfd, f'--checkpoint={workdir}', paths[0], status=1)
  assert not records and err[-1].startswith('0 named in ')


def test_names_that_are_not_utf8(run, tmp_path, capfdbinary):
  workdir, tree = run
  strange = os.path.join(os.fsencode(tmp_path), b'a\xff\n"\xc3\xa9.jpg')
  pathlib.Path(os.fsdecode(strange)).write_bytes((tree / 'big_cat' / '1.jpg').read_bytes())
  assert _main(f'--checkpoint={workdir}', tmp_path, '--top=1') == 0
  out, _ = capfdbinary.readouterr()
  (row,) = csv.DictReader(io.StringIO(out.decode(errors='surrogateescape'), newline=''))
  assert os.fsencode(row['file']) == strange
  assert _main(f'--checkpoint={workdir}', tmp_path, '--format=jsonl') == 0
  out, _ = capfdbinary.readouterr()
  lines = [json.loads(line) for line in out.splitlines()]
  assert len(lines) == 5
  assert {os.fsencode(line['file']) for line in lines} == {strange}
  for name, start in (('b.jsonl', b'{'), ('b.csv', b'file,rank'), ('b', b'file,rank')):
    output = tmp_path / name
    assert _main(f'--checkpoint={workdir}', tmp_path, f'--output={output}', '--top=1') == 0
    assert output.read_bytes().startswith(start)


def test_sheet(run, tmp_path, capfd, monkeypatch):
  workdir, tree = run
  monkeypatch.setattr(sheet, 'MOST', 5)
  titles, legends = [], []
  write, legend = sheet.write, sheet.legend
  monkeypatch.setattr(sheet, 'write', lambda *a: (titles.extend(a[-1]), write(*a)))
  monkeypatch.setattr(sheet, 'legend', lambda *a: legends.append(legend(*a)) or legends[-1])
  path = tmp_path / 'names.png'
  flags = (f'--checkpoint={workdir}', tree / 'red_car', f'--sheet={path}')
  records, _ = _named(capfd, *flags, '--explain')
  image = np.asarray(Image.open(path).convert('RGB'))
  assert 'the first 5 of 12 images; 7 left out' in titles[0]
  assert legends == [
    'below each image its file; bars: probabilities of the classes and their '
    'parts: blue the pair, orange the adjective, green the noun'
  ]
  # The first thumbnail, enlarged nine times, and the bar of its best pair.
  config = trained_lib.load(str(workdir)).config
  want = decode_pillow.eval_decoder(config)(pathlib.Path(records[0]['file']).read_bytes())
  want = want.repeat(9, 0).repeat(9, 1)
  places = np.argwhere((image[:, :, :] == want[0, 0]).all(-1))
  assert any(np.array_equal(image[y : y + 144, x : x + 144], want) for y, x in places)
  blue = (image == (0x9F, 0xD0, 0xEE)).all(-1)
  assert blue.any()


# The command.


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    ([], ['--checkpoint']),
    (['--checkpoint=none', 'x.jpg'], ['none', 'workdir']),
    (['--checkpoint=x', '-', '-'], ['twice']),
    (['--checkpoint=x', 'x.jpg', '--top=0'], ['--top=0', '1 or more']),
    (['--checkpoint=x', 'y', '--format=jsn'], ['jsn', 'jsonl']),
    (['--checkpoint=x', 'y', '--output=RESOURCE_EXHAUSTED/where.csv'], ['--output', 'where']),
  ],
)
def test_refused(flags, words, capfd):
  assert _main(*flags) == 2
  builders.error_line(capfd, *words)


def test_an_earlier_table_stays_if_nothing_can_be_named(run, tmp_path, monkeypatch):
  workdir, tree = run
  output = tmp_path / 'names.csv'
  output.write_text('earlier')
  monkeypatch.setattr(network_lib.Network, 'names', lambda *_: [][0])
  with pytest.raises(IndexError):
    _main(f'--checkpoint={workdir}', tree, f'--output={output}')
  assert output.read_text() == 'earlier'


class Diverged(nn.Module):
  """A network whose outputs are no numbers."""

  num_classes: int

  @nn.compact
  def __call__(self, images, train):
    return jnp.full((len(images), self.num_classes), jnp.nan)


def test_a_network_that_diverged_is_refused(config):
  config.model.name = f'{__name__}:Diverged'
  pairs = vocabulary.Vocabulary(('big_cat', 'old_dog')).with_pairs('yes')
  trained = trained_lib.Trained('place', config, pairs, 0, {}, {})
  net = network_lib.Network(trained, 2, 8)
  with pytest.raises(ValueError, match='place.*not finite'):
    net.names(net.start(np.zeros((8, 32, 32, 3), np.uint8)), 8)


def _process(workdir, *arguments):
  return launching.start(
    '-c',
    'import sys; from anp_jax.predict import __main__ as predict\n'
    'status = predict.main(sys.argv)\n'
    'loaded = {"tensorflow", "tensorboard", "matplotlib"} & {*sys.modules}\n'
    'sys.exit(f"imported {loaded}" if loaded else status)',
    f'--checkpoint={workdir}',
    '--trust',
    *arguments,
  )


@pytest.mark.slow
def test_tensorflow_stays_out_and_a_list_comes_on_stdin(run):
  workdir, tree = run
  process = _process(workdir, '-', '--top=1')
  paths = sorted(str(p) for p in tree.glob('*/*.jpg'))[::-1]
  out, err = process.communicate('\n'.join(paths))
  assert process.returncode == 0, err
  assert [row['file'] for row in csv.DictReader(io.StringIO(out))] == paths
  assert err.startswith('50 named')  # nothing else is said


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(run):
  workdir, tree = run
  process = _process(workdir, *[tree] * 40)
  process.stdout.readline()
  process.stdout.close()
  err = process.stderr.read()
  assert process.wait() == 0 and 'Error' not in err
