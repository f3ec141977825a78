"""Functions of a map whose channels do not meet: ReLU, pooling, bias.

A strategy that has some of a map's channels on each device may compute them
there, before the device gets the others (`parallel.channel_split`).
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import functools

_HANDLER: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
  'channelwise', default=None
)


def by_channel(function: Callable) -> Callable:
  """Lets a strategy compute a function on some of a map's channels.

  Args:
    function: maps a map (batch, height, width, channels), further arrays whose
      last axis is the channels, and settings, which are no arrays, to such a
      map, or to a tuple of it and further such arrays; each channel of a result
      depends on that channel alone.
  """

  @functools.wraps(function)
  def call(x, *arguments, **settings):
    handler = _HANDLER.get()
    if handler is None:
      return function(x, *arguments, **settings)
    bound = functools.partial(function, **settings)
    return handler(bound, x, *arguments)

  return call


@contextlib.contextmanager
def computed_by(handler: Callable) -> Iterator[None]:
  """Within this context, `handler` computes all functions of this kind.

  Args:
    handler: called as (function, x, *arguments), returns what
      function(x, *arguments) does.
  """
  token = _HANDLER.set(handler)
  try:
    yield
  finally:
    _HANDLER.reset(token)
