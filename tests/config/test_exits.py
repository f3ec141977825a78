"""How a command ends."""

from unittest import mock

import pytest

from anp_jax import config as config_lib
from anp_jax.config import exits
from tests import launching


@pytest.mark.parametrize(
  'outcome, status, line',
  [
    (None, 0, ''),
    (1, 1, ''),
    (config_lib.ConfigError('a\nb'), 2, 'error: a b\n'),
    (FileNotFoundError(2, 'None', 'x'), 2, "error: [Errno 2] None: 'x'\n"),
    (KeyboardInterrupt(), 130, '\nstopped; again\n'),
  ],
  ids=str,
)
def test_a_command_returns_its_status(outcome, status, line, capsys):
  @exits.with_status('stopped; again')
  def main(arguments):
    assert arguments == ['x']
    if isinstance(outcome, BaseException):
      raise outcome
    return outcome

  assert main(['x']) == status
  assert capsys.readouterr() == ('', line)


@pytest.mark.parametrize(
  'text, line',
  [
    ('a\nb', 'a b'),
    ('a\rb', 'a\\rb'),
    ('\x1b[2J', '\\x1b[2J'),
    ('\u2028', '\\u2028'),
    ('\ud800', '\\ud800'),
    ('grün 猫', 'grün 猫'),
    ('x' * 10**5, f'{"x" * 3993}... (100,007 letters)'),
  ],
)
def test_an_error_is_one_line_that_no_terminal_obeys(text, line, capsys):
  main = exits.with_status()(mock.Mock(side_effect=config_lib.ConfigError(text)))
  assert main([]) == 2
  assert capsys.readouterr().err == f'error: {line}\n'


def test_what_is_no_users_error_is_raised():
  main = exits.with_status()(mock.Mock(side_effect=ZeroDivisionError))
  with pytest.raises(ZeroDivisionError):
    main([])


def test_a_reader_may_leave_before_the_end():
  program = """if True:
    from anp_jax.config import exits

    @exits.with_status()
    def main(arguments):
      while True:
        print('line')

    raise SystemExit(main([]))
  """
  with launching.start('-c', program) as process:
    process.hears('line')
    process.stdout.close()
    assert process.stderr.read() == '' and process.wait() == 0
