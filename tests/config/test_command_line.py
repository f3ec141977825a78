"""What all commands refuse alike, and what --help tells of the config."""

import os

import pytest

from anp_jax import __main__ as main, config as config_lib, export
from anp_jax.config import command_line, help
from anp_jax.data.prepare import __main__ as prepare
from anp_jax.data.show import __main__ as show
from anp_jax.predict import __main__ as predict
from anp_jax.system import xla_flags
from anp_jax.tools.compare import __main__ as compare
from anp_jax.tools.plan import __main__ as plan
from anp_jax.tools.study import __main__ as study
from tests import builders, launching

_TINY = f'--config={launching.ROOT}/configs/resnet_anp.py:tiny'


def _line(capsys, command, *arguments):
  """The line with which a command refuses."""
  assert command(list(arguments)) == 2
  return builders.error_line(capsys)


def _run(tmp_path):
  run = tmp_path / 'run'
  run.mkdir()
  config = command_line.load(_TINY.removeprefix('--config='), {})
  (run / 'config.json').write_text(config_lib.to_json(config))
  return run


# Command, what it is called with, and what else is the name of another format.
_NAMED = [
  ('predict', '--sheet=names.pgn', "did you mean '.png'?"),
  ('predict', '--sheet=names', 'ends in .png'),
  ('predict', '--output=names.cvs', "did you mean '.csv'?"),
  ('predict', '--output=names.txt', '.csv or .jsonl or .json or .ndjson'),
  ('plan', '--out=plan.xyz', 'ends in .png'),
  ('plan', '--out=plan.pdf', 'ends in .png'),
  ('compare', '--output=x.txt', 'ends in .html or .htm'),
  ('compare', '--output=x.htlm', "did you mean '.htm'?"),
  ('papers', '--page=page.dm', "did you mean '.md'?"),
]


@pytest.mark.parametrize('name, flag, hint', _NAMED)
def test_a_name_of_another_format_is_refused(name, flag, hint, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run = _run(tmp_path)
  command, arguments = {
    'predict': (predict.main, ['predict', f'--checkpoint={run}', str(run)]),
    'plan': (plan.main, [_TINY, '--device=h100']),
    'compare': (compare.main, ['compare', str(run)]),
    'papers': (study.main, ['papers', 'ring2015', f'--workdir={run}']),
  }[name]
  text = _line(capsys, command, *arguments, flag)
  name, _, path = flag.partition('=')
  assert f'{name}={path!r}' in text and hint in text
  assert [p.name for p in tmp_path.iterdir()] == ['run']


def test_a_name_of_one_format_and_another_format(tmp_path, capsys):
  text = _line(
    capsys,
    predict.main,
    'predict',
    f'--checkpoint={_run(tmp_path)}',
    'x',
    '--output=names.csv',
    '--format=jsonl',
  )
  assert "--output='names.csv'" in text and '--format=jsonl' in text


# Function, what it is called with, and the flag with the place to write to.
_WRITING = {
  'train': (main.main, ['main.py', _TINY], '--workdir'),
  'evaluate': (main.main, ['main.py', '--mode=evaluate', '--workdir={run}'], '--output'),
  'predict': (predict.main, ['predict', '--checkpoint={run}', '{run}'], '--output'),
  'sheet': (predict.main, ['predict', '--checkpoint={run}', '{run}'], '--sheet'),
  'export': (export.main, ['export', '--checkpoint={run}'], '--output'),
  'show': (show.main, ['show', _TINY], '--output'),
  'prepare': (prepare.main, ['prepare', '--from={run}', '--name=x'], '--data_dir'),
  'study': (study.main, ['strategies', _TINY], '--workdir'),
}


@pytest.mark.parametrize('name', _WRITING)
def test_a_place_that_cannot_be_written_to(name, tmp_path, capsys, monkeypatch):
  command, arguments, flag = _WRITING[name]
  run = _run(tmp_path)
  arguments = [a.format(run=run) for a in arguments]
  is_file = flag == '--sheet' or name == 'predict'
  (tmp_path / 'file').write_text('')
  place = tmp_path / 'file' / 'new' if is_file else tmp_path / 'file'
  text = _line(capsys, command, *arguments, f'{flag}={place}')
  assert f'{flag}={str(place)!r}' in text
  assert f'{tmp_path}/file' in text and 'expected a f' in text
  if not is_file:
    text = _line(capsys, command, *arguments, f'{flag}={place}/deep/new')
    assert f'{place} is a file, expected a folder' in text
  sealed = tmp_path / 'sealed'
  sealed.mkdir(0o555)
  if os.access(sealed, os.W_OK):  # as root
    real = os.access
    monkeypatch.setattr(os, 'access', lambda path, *m: str(path) != str(sealed) and real(path, *m))
  place = sealed / ('new.png' if flag == '--sheet' else 'new')
  text = _line(capsys, command, *arguments, f'{flag}={place}')
  assert f'{flag}={str(place)!r}: {sealed} cannot be written to' in text


@pytest.mark.parametrize('name', ['train', 'predict'])
def test_a_gpu_without_a_plugin_stops_it(name, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(xla_flags, 'missing_plugin', lambda *_: 'the line')
  command, arguments, flag = _WRITING[name]
  run = _run(tmp_path)
  arguments = [a.format(run=run) for a in arguments]
  text = _line(capsys, command, *arguments, f'{flag}={tmp_path}/new')
  assert text == 'error: the line'


@pytest.mark.parametrize(
  'run, data, how',
  [
    ('data/runs/a', 'data', 'inside'),
    ('data', 'data/', 'inside'),
    ('link/run', 'data', 'inside'),
    ('run', 'run/data', 'around'),
    ('data/../run', 'run/data/train', 'around'),
  ],
)
def test_a_run_and_its_data_are_apart(run, data, how, tmp_path, capsys):
  for folder in ('data', 'run/data/train'):
    (tmp_path / folder).mkdir(parents=True)
  (tmp_path / 'link').symlink_to('data')
  workdir, path = f'{tmp_path}/{run}', f'{tmp_path}/{data}'
  text = _line(
    capsys,
    main.main,
    'main.py',
    _TINY,
    f'--workdir={workdir}',
    '--config.data.source=folder',
    f'--config.data.path={path}',
  )
  assert f'--workdir={workdir} is {how} config.data.path={path}' in text


@pytest.mark.parametrize('output', ['data/happy_dog', 'data', ''])
def test_an_evaluation_is_not_written_among_its_data(output, tmp_path):
  keys = {'data.source': 'folder', 'data.path': f'{tmp_path}/data'}
  for folder in ('data', 'run'):
    (tmp_path / folder).mkdir()
  (tmp_path / 'run/config.json').write_text(config_lib.to_json(builders.config(keys)))
  arguments = ['--mode=evaluate', f'--workdir={tmp_path}/run', f'--output={tmp_path}/{output}']
  flags = command_line.main_flags(arguments, '')
  if not output:
    command_line.from_flags(flags, {})
    return
  line = f'--output={tmp_path}/{output} is inside config.data.path={tmp_path}/data'
  builders.assert_refused(line, command_line.from_flags, flags, {})


@pytest.mark.parametrize('run', ['database', 'runs/data', 'da'])
def test_a_run_beside_its_data_is_well(run, tmp_path):
  (tmp_path / 'data').mkdir()
  flags = command_line.main_flags([_TINY, f'--workdir={tmp_path}/{run}'], '')
  keys = {'data.source': 'folder', 'data.path': f'{tmp_path}/data'}
  _, workdir = command_line.from_flags(flags, keys)
  assert workdir == f'{tmp_path}/{run}'


@pytest.mark.parametrize(
  'flag, words',
  [
    ('--train_split=tain', ['set --train_split and --eval_split']),
    ('--train_split={tmp}/split.txt', ['give the classes (--lists)']),
    ('--trainsplit=train', ["did you mean '--train_split'?"]),
    ('--lists={tmp}/names.txt', ["'sofa' is not an", '--pairs=no']),
    ('--pairs=on', ['--pairs=on', 'one of auto, yes, no']),
  ],
)
def test_prepare_names_flags_of_its_own(flag, words, tmp_path, capsys):
  for split in ('train', 'validation'):
    (tmp_path / 'images' / split / 'red_car').mkdir(parents=True)
  (tmp_path / 'split.txt').write_text('1.jpg 0\n')
  (tmp_path / 'names.txt').write_text('red_car\nbig_car\nsofa\n')
  text = _line(
    capsys,
    prepare.main,
    'prepare',
    f'--from={tmp_path}/images',
    '--name=x',
    '--eval_split=',
    f'--data_dir={tmp_path}/sets',
    flag.format(tmp=tmp_path),
  )
  assert 'config.' not in text
  for word in words:
    assert word in text


def test_a_required_flag_that_is_mistyped_is_named(capsys):
  text = _line(capsys, prepare.main, 'prepare', '--form=photos', '--name=x')
  assert "'--form=photos'; did you mean '--from'?" in text


_RECIPE = '--config=configs/resnet_anp.py'


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], ['--config', 'missing']),
    (['--config=configs/resnet_amp.py'], ['resnet_amp', 'resnet_anp.py']),
    ([f'{_RECIPE}:dmo'], ["'dmo'", "did you mean 'demo'"]),
    ([_RECIPE, '--config.learning_rate=1'], ["mean 'optimizer.learning_rate'"]),
    ([_RECIPE, '--config.batch_size'], ['--config.batch_size', 'expected a value']),
    ([_RECIPE, '--config.data.dir', '--workdir=x'], ['--config.data.dir: expected a value']),
    ([_RECIPE, '--mode=evaluate'], ['--mode=evaluate', '--workdir']),
    ([_RECIPE, '--checkpoint=bset'], ['--checkpoint', "'best'"]),
    ([_RECIPE, '--checkpoint=best'], ['--checkpoint=best', '--mode=evaluate']),
    ([_TINY, '--wokrdir=x'], ["did you mean '--workdir'?"]),
    ([_TINY, '--learning_rate=1'], ["did you mean '--config.optimizer.learning_rate'?"]),
    ([_TINY, '--optimizer.momentum=1'], ["did you mean '--config.optimizer.momentum'?"]),
    ([_TINY, '--batch_size=1'], ["did you mean '--config.batch_size'?"]),
    ([_TINY, '--confg.data.path=x'], ["did you mean '--config.data.path'?"]),
    ([_TINY, 'config.data.path=x'], ["did you mean '--config.data.path'?"]),
    ([_TINY, '--mode=eval'], ["did you mean 'evaluate'?"]),
    ([_TINY, '--num_process=2'], ["did you mean '--num_processes'?"]),
    ([_TINY, 'demo'], ["unknown argument 'demo'"]),
  ],
)
def test_bad_input_is_one_clear_line(arguments, words, capsys, monkeypatch):
  monkeypatch.chdir(launching.ROOT)
  line = _line(capsys, main.main, 'main.py', *arguments)
  assert all(word in line for word in words), line


@pytest.mark.parametrize(
  'arguments, status, words',
  [
    (['main.py', _RECIPE, '--config.sed=1'], 2, ["did you mean 'seed'"]),
    (['main.py', '--help', 'data'], 0, ['config.data.source = ']),
    (
      ['-m', 'anp_jax.data.prepare', '--help'],
      0,
      ['--from', '--policy', '--workers', 'placeholder', 'leak'],
    ),
  ],
)
def test_an_answer_imports_nothing_heavy(arguments, status, words, tmp_path):
  """With modules that fail to import in jax's and TensorFlow's places."""
  for name in ('jax', 'flax', 'optax', 'orbax', 'tensorflow', 'tensorflow_datasets'):
    (tmp_path / f'{name}.py').write_text('raise SystemExit("heavy")')
  done = launching.python(*arguments, status=status, PYTHONPATH=str(tmp_path))
  assert all(word in done.stdout + done.stderr for word in words)
  assert max(map(len, done.stdout.splitlines()), default=0) <= 80


def test_evaluation_of_what_is_no_run(tmp_path, capsys, monkeypatch):
  run = _run(tmp_path)
  evaluate = ['main.py', '--mode=evaluate']
  text = _line(capsys, main.main, *evaluate, f'--workdir={tmp_path}')
  assert f'{str(tmp_path)!r} is not a run: it has no config.json' in text
  text = _line(capsys, main.main, *evaluate, f'--workdir={run}n')
  assert f"not '{run}n'; did you mean 'run'?" in text
  monkeypatch.chdir(run)
  text = _line(capsys, main.main, *evaluate)
  assert text == 'error: --mode=evaluate needs the --workdir of a run'


def test_help_of_a_key_is_what_its_declaration_says():
  assert help.text('config.data.mixup') == (
    'config.data.mixup = 0.0  mixup alpha; 0: none (0 or more)'
  )
  # A key of several strategies has a meaning in each.
  lines = help.text('strategy.shares').splitlines()
  titles = [x.partition(':')[0] for x in lines if x.startswith('# strategy')]
  assert titles == ['# strategy.name=channel_split', '# strategy.name=model_ring']
  assert lines.count('config.strategy.shares = ()') == 2


def test_help_says_with_what_a_key_has_a_meaning():
  text = ' '.join(help.text('optimizer.b1').split())
  assert 'a number from 0, below 1' in text
  assert 'only with optimizer.name=adam, adamw, lamb' in text


def test_help_has_every_key_with_its_default():
  want = config_lib.known_keys()
  text = help.text('all')
  assert max(map(len, text.splitlines())) <= 80
  lines = [x for x in text.splitlines() if x.startswith('config.')]
  printed = dict(line.removeprefix('config.').split(' = ', 1) for line in lines)
  assert printed.keys() == want.keys()
  for key, declared in want.items():
    assert printed[key].split('  ')[0] == repr(declared.default)
  # A group and the keys of no group are parts of it.
  assert help.text('schedule') in text
  assert help.text('config.duration') in help.text('config')


def test_text_of_a_key_is_a_phrase_that_stands_alone():
  texts = {key: declared.help.strip() for key, declared in config_lib.known_keys().items()}
  assert not [key for key, text in texts.items() if not text]
  assert not [key for key, text in texts.items() if text.lower().startswith(('of ', 'see ', 'as '))]


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_of_the_command(flag, capsys):
  with pytest.raises(SystemExit) as end:
    main.main(['main.py', flag])
  assert end.value.code == 0
  text = ' '.join(capsys.readouterr().out.split())
  words = '--workdir DIR', '--config.KEY=VALUE', '--help=GROUP', 'groups: config, data, model'
  assert all(word in text for word in words)


def test_help_of_what_there_is_not(capsys):
  text = _line(capsys, main.main, 'main.py', '--help=dta')
  assert '--help=dta: expected a group (config, data, model, init' in text
  assert "did you mean 'data'?" in text


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--mode=evaluate'], '--change=schedule is for --mode=train'),
    ([], "is for a run that is resumed: --workdir='{}' has no checkpoint"),
    (['--config=configs/model_ring_anp.py'], 'the models of a ring keep'),
    (['--change=schedul'], "did you mean 'schedule"),
  ],
)
def test_a_change_is_refused_before_anything_starts(flags, words, tmp_path, capsys):
  (tmp_path / 'config.json').write_text('{}')
  text = _line(
    capsys, main.main, 'main.py', _TINY, f'--workdir={tmp_path}', '--change=schedule', *flags
  )
  assert words.format(tmp_path) in text


@pytest.mark.parametrize('mode', ['benchmark', 'range_test'])
@pytest.mark.parametrize('strategy', ['parameter_server', 'model_ring'])
def test_what_has_no_step_is_not_tried(mode, strategy, capsys):
  keys = [f'--config.strategy.name={strategy}']
  if strategy == 'model_ring':
    keys += ["--config.strategy.models=('seed=1', 'seed=2')"]
  text = _line(capsys, main.main, 'main.py', _TINY, f'--mode={mode}', *keys)
  assert f"--mode={mode}: with config.strategy.name='{strategy}'" in text


def test_a_range_test_sets_what_is_not_typed():
  flags = command_line.main_flags([_TINY, '--mode=range_test'], '')
  config, _ = command_line.from_flags(flags, {'duration': '50 steps'})
  assert (config.schedule.name, config.duration) == ('range', '50 steps')
  assert config.optimizer.learning_rate == 10
  builders.assert_refused(
    "expected 'range'", command_line.from_flags, flags, {'schedule.name': 'cosine'}
  )
