"""Threads whose errors are not lost."""

from collections.abc import Callable
from concurrent import futures
import threading
from typing import Any


def start(function: Callable[[], Any], name: str) -> futures.Future:
  """Runs a function in a thread that no end of the process waits for.

  Args:
    function: called without arguments.
    name: name of the thread.

  Returns:
    What the function returns or raises.
  """
  future: futures.Future = futures.Future()

  def run():
    try:
      future.set_result(function())
    except BaseException as e:  # noqa: BLE001 - raised by `Future.result`
      future.set_exception(e)

  threading.Thread(target=run, name=name, daemon=True).start()
  return future
