"""The flag --strategies of a study: names of strategies, and files of strategies with settings.

A file such as `methods.toml` names each of its strategies by a table of keys of the config:

  [dana]
  strategy.name = "parameter_server"
  strategy.look_ahead = "dana"
  optimizer.learning_rate = 0.003
"""

from collections.abc import Iterable, Mapping
import dataclasses

from anp_jax import config as config_lib
from anp_jax.config import errors, resolve, strategy as strategy_lib
from anp_jax.tools import flag_values

# Baselines that only a study has, by the name that --strategies takes.
BASELINES = {'independent': 'anp_jax.tools.study.independent:Independent'}
_CHOICES = (*strategy_lib.BUILT_IN, *BASELINES)
_NAME = 'strategy.name'


@dataclasses.dataclass(frozen=True)
class NamedStrategy:
  """A strategy of a study.

  Attributes:
    label: its name in tables, figures and folders.
    name: config.strategy.name.
    settings: (key, text) of the keys of the config that it alone sets.
  """

  label: str
  name: str
  settings: tuple[tuple[str, str], ...] = ()


def parse(text: str) -> tuple[NamedStrategy, ...]:
  """Returns the strategies of a list such as 'sync,methods.toml', in its order, each once.

  Raises:
    ConfigError: for an unknown name, with those there are, and for a file that cannot be read,
      an unknown key, with the nearest, or a value that its key does not take.
  """
  strategies: list[NamedStrategy] = []
  for name in map(str.strip, text.split(',')):
    if name.endswith('.toml'):
      tables = flag_values.tables(f'--strategies={name}', name)
      strategies += [_strategy(name, label, table) for label, table in tables.items()]
    else:
      class_name = _checked(f'--strategies={name}', name, 'FILE.toml')
      strategies.append(NamedStrategy(name, class_name))
  by_label: dict[str, NamedStrategy] = {}
  for strategy in strategies:
    if by_label.setdefault(strategy.label, strategy) != strategy:
      raise config_lib.ConfigError(f'--strategies={text}: two strategies named {strategy.label}')
  return tuple(by_label.values())


def check_unset(strategies: Iterable[NamedStrategy], flags: Mapping[str, str]) -> None:
  """Raises ConfigError for a setting of a key that a flag sets, too.

  Args:
    strategies: strategies of the study.
    flags: flags that set a key for all strategies, by dotted key.
  """
  for strategy in strategies:
    for key, value in strategy.settings:
      if key in flags:
        raise config_lib.ConfigError(
          f'--strategies: {strategy.label} sets {key}={value}, and so does {flags[key]}'
        )


def _strategy(path, label, table):
  where = f'--strategies={path}: [{label}]'
  settings = dict(_flat(table)) if isinstance(table, dict) else {}
  name = settings.pop(_NAME, None)
  if not isinstance(name, str):
    raise config_lib.ConfigError(f'{where}: expected a table with {_NAME}')
  name = _checked(f'{where} {_NAME}={name}', name)
  keys = resolve.known_keys(name)
  texts = []
  for key, value in settings.items():
    if key not in keys:
      raise config_lib.ConfigError(f'{where}: unknown key {key}{config_lib.nearest(key, keys)}')
    text = value if isinstance(value, str) else repr(value)
    keys[key].validate(key, keys[key].parse(key, text))
    texts.append((key, text))
  return NamedStrategy(label, name, tuple(texts))


def _checked(place, name, form=''):
  """config.strategy.name of a strategy's name, which is refused if there is none."""
  if ':' not in name:  # package.module:Class is a user's own
    errors.check_choice(place, name, _CHOICES, form)
  return BASELINES.get(name, name)


def _flat(table, prefix=''):
  """(dotted key, value) of a table and those within it."""
  for key, value in table.items():
    if isinstance(value, dict):
      yield from _flat(value, f'{prefix}{key}.')
    else:
      yield prefix + key, tuple(value) if isinstance(value, list) else value
