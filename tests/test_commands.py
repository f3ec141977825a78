"""The commands of an installed package, without an installation."""

import importlib
import sys
import tomllib
import types

import pytest

import anp_jax
from anp_jax import __main__ as train_command, commands
from anp_jax.config import argument_parser
from anp_jax.system import interrupts, xla_flags
from tests import launching

_PROJECT = tomllib.loads((launching.ROOT / 'pyproject.toml').read_text())['project']
_NAMES = [name.removeprefix('anp-') for name in _PROJECT['scripts']]
# Their main functions take what follows the command's name.
_WITHOUT_NAME = (
  'anp_jax.tools.study.__main__',
  'anp_jax.tools.plan.__main__',
  'anp_jax.tools.portability.__main__',
  'anp_jax.tools.trials.replay',
)
# Studies save what runs, and a planner ends by itself.
_WITHOUT = 'study', 'plan'
_COMPUTING = 'train', 'evaluate', 'predict'


def test_the_commands_are_those_of_the_project():
  assert _PROJECT['scripts'] == {f'anp-{name}': f'anp_jax.commands:{name}' for name in _NAMES}


@pytest.mark.parametrize('name', _NAMES)
def test_ctrl_c_is_answered_before_a_module_is_imported(monkeypatch, name):
  events = []
  real = importlib.import_module(getattr(commands, name).args[0])

  def import_module(module):
    events.append(module)
    program = types.SimpleNamespace(main=lambda argv: events.append({}))
    if hasattr(real, 'command'):
      program.command = lambda **arguments: events.append(arguments)
    return program

  monkeypatch.setattr(interrupts, 'install', lambda: events.append('install'))
  monkeypatch.setattr(interrupts, 'listen', lambda: None)
  monkeypatch.setattr(interrupts, 'exit', lambda status: None)
  monkeypatch.setattr(xla_flags, 'use_huge_pages', lambda: events.append('restart'))
  with monkeypatch.context() as patch:
    patch.setattr(importlib, 'import_module', import_module)
    getattr(commands, name)()
  *before, module, arguments = events
  expected = {'install': name not in _WITHOUT, 'restart': name in _COMPUTING}
  assert before == [event for event, comes in expected.items() if comes]
  assert module == real.__name__
  assert not arguments or set(arguments) <= set(real.command.__code__.co_varnames)


@pytest.mark.parametrize(
  'typed, lines',
  [
    ('/x/bin/anp-show', ['usage: anp-show a', 'anp-show --stats', 'anp_jax.showy']),
    (
      '/x/show.py',
      ['usage: python -m anp_jax.show a', 'python -m anp_jax.show --stats', 'anp_jax.showy'],
    ),
  ],
)
def test_help_names_the_command_as_it_was_typed(monkeypatch, typed, lines):
  monkeypatch.setattr(sys, 'argv', [typed])
  parser = argument_parser.Parser(
    prog='python -m anp_jax.show a',
    add_help=False,
    description='python -m anp_jax.show --stats\npython -m anp_jax.showy',
  )
  text = parser.format_help()
  for line in lines:
    assert line in text
  if 'bin' in typed:
    assert 'python -m anp_jax.show ' not in text


@pytest.mark.parametrize(
  'module',
  [
    *sorted({getattr(commands, name).args[0] for name in _NAMES}),
    'anp_jax.tools.portability.__main__',
    'anp_jax.tools.trials.replay',
  ],
)
@pytest.mark.parametrize('before', [[], ['--config=configs/lenet.py']])
def test_each_command_tells_its_version(module, before, capsys):
  main = importlib.import_module(module).main
  arguments = [*before, '--version']
  if module not in _WITHOUT_NAME:
    arguments.insert(0, 'command')
  with pytest.raises(SystemExit) as end:
    main(arguments)
  assert not end.value.code
  out, err = capsys.readouterr()
  assert (out, err) == (f'anp_jax {anp_jax.__version__}\n', '')
  assert tuple(map(int, anp_jax.__version__.split('.'))) >= (0, 1, 0)


def test_anp_evaluate_only_evaluates(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(sys, 'argv', ['/x/bin/anp-evaluate'])
  argv = ['anp-evaluate', '--mode=train']
  assert train_command.main(argv, mode='evaluate') == 2
  line = "error: unknown argument '--mode=train'"
  assert capsys.readouterr().err.startswith(line)
  argv = ['anp-evaluate', f'--workdir={tmp_path}']
  assert train_command.main(argv, mode='evaluate') == 2
  assert 'is not a run: it has no config.json' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    train_command.main(['anp-evaluate', '--help'], mode='evaluate')
  text = capsys.readouterr().out
  assert 'usage: anp-evaluate' in text
  assert 'anp-evaluate --workdir=runs/demo --checkpoint=best' in text
  assert '--mode NAME' not in text
