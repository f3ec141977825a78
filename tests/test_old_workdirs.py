"""Workdirs made by an earlier state of this code still serve.

Each goes on, is scored, names photographs, is exported and replayed by the
commands that people typed then, with the keys that those had. Nothing of the
package is imported: where its modules stand may change. What must come out is
in data/workdirs/expected.json; data/workdirs/README.md tells how it was made.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile

import jax
import numpy as np
import orbax.checkpoint as ocp
from PIL import Image
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / 'tests' / 'data' / 'workdirs'
CLASSES = 'happy_dog', 'happy_cat', 'misty_dog', 'misty_cat'
# Of probabilities and scores, on whatever machine; shares of right answers may
# change by the images that stand between two classes.
NEAR = 1e-4
SHARE = 0.05


def expected() -> dict:
  """What the code that made the workdirs made of them."""
  return json.loads((DATA / 'expected.json').read_text())


def machine() -> dict:
  """What decides the last bits of a run on a CPU."""
  text = pathlib.Path('/proc/cpuinfo').read_text()
  keys = 'model name', 'cpu family', 'model', 'stepping'
  result = [re.search(rf'^{k}\s*: (.*)$', text, re.MULTILINE) for k in keys]
  return {
    'cpu': ', '.join(m[0].replace('\t', '') for m in result if m),
    'cores': len(os.sched_getaffinity(0)),
    'jax': jax.__version__,
  }


def photograph(shape, number) -> Image.Image:
  """Waves of a colour, by a formula; integers only."""
  y, x, c = np.ogrid[: shape[0], : shape[1], :3]
  waves = x * (number % 5 + 1) + y * (number % 7 + 2) + c * 31 * (number + 1)
  return Image.fromarray((waves * 5 % 256).astype(np.uint8))


def photographs(folder):
  """The training data of `sync`: four pairs, 16 and 8 images of each."""
  for split, count in ('train', 16), ('validation', 8):
    for k, name in enumerate(CLASSES):
      place = folder / split / name
      place.mkdir(parents=True)
      for i in range(count):
        recorded = photograph((20, 24), 4 * i + k + 100 * (split == 'train'))
        recorded.save(place / f'{i:02}.png')


def unpacked(name, folder) -> pathlib.Path:
  """The workdir, as it was when its run had ended."""
  with tarfile.open(DATA / f'{name}.tar.xz') as archive:
    archive.extractall(folder, filter='data')
  photographs(folder / 'photos')
  return folder / name


def started(workdir, devices, *words) -> subprocess.Popen:
  """A command of expected.json, or another, in the repository's root."""
  for short, long in (
    ('PYTHON', sys.executable),
    ('WORKDIR', str(workdir)),
    ('PHOTOS', str(workdir.parent / 'photos')),
  ):
    words = [w.replace(short, long) for w in words]
  return subprocess.Popen(
    words,
    cwd=ROOT,
    env={
      **os.environ,
      'PYTHON': sys.executable,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(devices),
      # The record is of XLA's arithmetic; oneDNN rounds differently.
      'ANP_ONEDNN': 'off',
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def ended(*processes) -> list[str]:
  """What each wrote; all must end well."""
  with contextlib.ExitStack() as stack:
    for process in processes:
      stack.enter_context(process)
      stack.callback(process.kill)
    texts = [process.communicate(timeout=240)[0] for process in processes]
  for process, text in zip(processes, texts):
    assert process.returncode == 0, f'{process.args}\n{text}'
  return texts


def weights(workdir) -> str:
  """The SHA-256 of params and stats, path by path, of all newest checkpoints.

  Read by Orbax alone.
  """
  result = hashlib.sha256()
  for folder in sorted(workdir.glob('**/checkpoints')):
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
    path = folder / str(max(steps)) / 'state'
    reader = ocp.PyTreeCheckpointer()
    tree = reader.metadata(path).item_metadata.tree
    kinds = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
    )
    state = reader.restore(path, restore_args=kinds)['state']
    leaves = {
      '/'.join(str(k.key) for k in keys): leaf
      for keys, leaf in jax.tree_util.tree_leaves_with_path(
        {k: state[k] for k in ('params', 'stats') if k in state}
      )
    }
    assert leaves
    result.update(f'{folder.relative_to(workdir)} {max(steps)}'.encode())
    for name in sorted(leaves):
      result.update(name.encode())
      result.update(np.asarray(leaves[name], np.float32).tobytes())
  return result.hexdigest()


def validations(workdir) -> list[dict]:
  """The last evaluation in each metrics.jsonl."""
  result = []
  for path in sorted(workdir.glob('**/metrics.jsonl')):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = [r for r in lines if r['kind'] == 'validation'][-1]
    names = 'step', 'loss', 'anp_top1', 'class_top1', 'adjective_top1'
    result.append({k: last[k] for k in names if k in last})
  return result


def use(name, workdir, devices, train, parts):
  """What the commands that use a workdir give; they run side by side."""
  if name == 'kernel_split_helpers':
    devices = 1  # evaluation goes without helpers, on all devices of a mesh
  config = [w for w in train if w.startswith('--config=')]
  images = [str(workdir.parent / f'{i}.png') for i in range(3)]
  for i, path in enumerate(images):
    photograph((30 - 4 * i, 24 + 3 * i), 11 * i + 3).save(path)
  module = ['PYTHON', '-m']
  model = 'WORKDIR/models/001' if name == 'relay' else 'WORKDIR'
  commands = {
    'evaluate': ['PYTHON', 'main.py', *config, '--workdir=WORKDIR',
                 '--mode=evaluate', *_keys(train)],
    'predict': [*module, 'anp_jax.predict', '--trust', f'--checkpoint={model}',
                '--top=4', '--output=WORKDIR.csv', *images],
    'export': [*module, 'anp_jax.export', '--trust', f'--checkpoint={model}',
               '--platforms=cpu', '--output=WORKDIR.exported'],
  }  # fmt: skip
  texts = dict(
    zip(parts, ended(*(started(workdir, devices, *commands[p]) for p in parts)))
  )
  readers = {'evaluate': _scores, 'predict': _names, 'export': _exported}
  return {part: readers[part](workdir, texts[part]) for part in parts}


def go_on(workdir, devices, resume) -> dict:
  """What is there after each command that makes a run longer."""
  for command in resume:
    ended(started(workdir, devices, *command))
  return {'scores': validations(workdir), 'weights': weights(workdir)}


def replayed(workdir) -> str:
  """The line of a replay that tells how many updates and leaves agree."""
  (text,) = ended(
    started(
      workdir, 1, 'PYTHON', '-m', 'anp_jax.strategies.server.replay', 'WORKDIR'
    )
  )
  return text.splitlines()[-2]


def _keys(train):
  return [w for w in train if w.startswith('--config.')]


def _scores(workdir, text):
  """Scores by name; of a ring, those of its leaderboard."""
  result = sorted(workdir.glob('evaluation/*/scores.json'))
  if result:
    return _numbers(json.loads(result[-1].read_text()))
  rows = [line.split('|') for line in text.splitlines() if '|' in line]
  rows = [[cell.strip() for cell in row] for row in rows]
  result = {
    f'{row[2]} {head}': float(row[6 + i].rstrip('%')) / (100 if i else 1)
    for row in rows
    for i, head in enumerate(('loss', 'class_top1'))
    if row[2].isdigit()
  }
  assert result, text
  return result


def _numbers(tree, path=''):
  """The numbers of a JSON object, by path; whatever else it holds."""
  if isinstance(tree, dict):
    tree = [_numbers(v, f'{path}/{k}') for k, v in tree.items()]
    return {k: v for result in tree for k, v in result.items()}
  is_number = isinstance(tree, int | float) and not isinstance(tree, bool)
  return {path[1:]: tree} if is_number else {}


def _names(workdir, _):
  """Name of file and class to probability."""
  lines = (workdir.parent / f'{workdir.name}.csv').read_text().splitlines()
  head = lines[0].split(',')
  rows = [dict(zip(head, line.split(','))) for line in lines[1:]]
  kind = 'anp' if 'anp' in head else 'class'
  return {
    f'{pathlib.Path(row["file"]).name} {row[kind]}': float(row['probability'])
    for row in rows
  }


def _exported(workdir, _):
  """The files, and what the program gives for an image, without the package."""
  folder = workdir.parent / f'{workdir.name}.exported'
  side = json.loads((folder / 'preprocessing.json').read_text())['image_size']
  image = np.asarray(photograph((side, side), 8))[None]
  with open(folder / 'model.stablehlo', 'rb') as f:
    program = jax.export.deserialize(f.read())
  logits = np.asarray(program.call(image)['logits'])[0]
  files = sorted(folder.iterdir())
  return {
    'files': [p.name for p in files],
    'texts': {p.name: json.loads(p.read_text()) for p in files
              if p.suffix == '.json'},
    'weights': {p.name: hashlib.sha256(p.read_bytes()).hexdigest()
                for p in files if p.suffix == '.safetensors'},
    'logits': logits.tolist(),
  }  # fmt: skip


def _is_near(result, want):
  """Numbers of a name agree; see NEAR and SHARE."""
  assert result.keys() == want.keys()
  for name, value in want.items():
    share = any(w in name for w in ('top', 'accuracy', 'ece', 'recall'))
    assert result[name] == pytest.approx(
      value, abs=SHARE if share else NEAR, rel=NEAR
    ), name


def _check_use(result, want):
  for part, is_now in result.items():
    if part == 'export':
      for name in 'files', 'texts', 'weights':
        assert is_now[name] == want[part][name]
      np.testing.assert_allclose(
        is_now['logits'], want[part]['logits'], atol=NEAR, rtol=NEAR
      )
    else:
      _is_near(is_now, want[part])


def _marked(*names):
  marks = {'server': [pytest.mark.multiprocess]}
  return [
    pytest.param(n, marks=[pytest.mark.slow, *marks.get(n, [])]) for n in names
  ]


@pytest.fixture(scope='module')
def record():
  return expected()


@pytest.fixture(scope='module')
def is_same_machine(record):
  """Whether this one rounds as that did which made the record."""
  return machine() == record['machine']


@pytest.mark.slow
def test_old_run_is_scored_and_names_photographs(tmp_path, record):
  recorded = record['workdirs']['sync']
  workdir = unpacked('sync', tmp_path)
  parts = 'evaluate', 'predict'
  result = use('sync', workdir, recorded['devices'], recorded['train'], parts)
  _check_use(result, recorded['use'])


@pytest.mark.parametrize(
  'name',
  _marked('sync', 'invariant', 'local', 'kernel_split', 'kernel_split_helpers',
          'relay'),
)  # fmt: skip
def test_old_run_goes_on(name, tmp_path, record, is_same_machine):
  recorded = record['workdirs'][name]
  workdir = unpacked(name, tmp_path)
  result = go_on(workdir, recorded['devices'], recorded['resume'])
  for is_now, was in zip(result['scores'], recorded['scores'], strict=True):
    _is_near(is_now, was)
  plan = workdir / 'kernel_split.json'
  if plan.exists():
    # The archive's, of format 2, has no costs of what plans consist of now: the
    # devices are measured again, and the new plan decides the last bits.
    assert json.loads(plan.read_text())['key']['format'] > 2
  elif is_same_machine:
    assert result['weights'] == recorded['weights']


@pytest.mark.parametrize(
  'name',
  _marked('sync', 'invariant', 'local', 'kernel_split', 'kernel_split_helpers',
          'server', 'relay'),
)  # fmt: skip
def test_old_run_is_used(name, tmp_path, record):
  recorded = record['workdirs'][name]
  workdir = unpacked(name, tmp_path)
  # What another test has not tried already.
  parts = ('export',) if name == 'sync' else tuple(recorded['use'])
  _check_use(
    use(name, workdir, recorded['devices'], recorded['train'], parts),
    recorded['use'],
  )


@pytest.mark.multiprocess
@pytest.mark.slow
def test_old_asynchronous_run_is_replayed_and_goes_on(
  tmp_path, record, is_same_machine
):
  recorded = record['workdirs']['server']
  workdir = unpacked('server', tmp_path)
  if is_same_machine:
    assert replayed(workdir) == recorded['replay']
  result = go_on(workdir, recorded['devices'], recorded['resume'])
  # Who comes first differs from time to time, and so do the weights.
  (is_now,), (was,) = result['scores'], recorded['scores']
  assert is_now.keys() == was.keys() and is_now['step'] == was['step']
  assert is_now['loss'] == pytest.approx(was['loss'], rel=0.2)
  if is_same_machine:
    assert replayed(workdir) == recorded['replay_after']
