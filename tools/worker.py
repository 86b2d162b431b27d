"""Calls of a function in another process, with a time limit.

A GPU kernel that waits for ever ends with its process alone, and LLVM ends its process on an
assertion. This module imports no jax: a process imports what its function needs, with environment
variables of its own.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from command import one_line

START_SECONDS = 120.0  # for what the function imports
_SPAWN = multiprocessing.get_context("spawn")
_starting = threading.Lock()  # a process inherits os.environ


class ProcessEnded(RuntimeError):
    """A call raised, or ended its process; the message says how. The process is gone."""


class NoAnswer(ProcessEnded):
    """A call took longer than it may. Its process was killed."""


def _serve(function: Callable[..., Any], connection: Connection, stderr: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    with open(stderr, "ab") as file:
        os.dup2(file.fileno(), 2)
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The process also ends if the parent is killed during a call.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    connection.send((True, None))
    while True:
        try:
            args = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args)
        except Exception as error:
            answer = False, one_line(error)
        connection.send(answer)


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """A context in which this process has other environment variables.

    The others are left alone: XLA's threads may be reading them.
    """
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclasses.dataclass(eq=False)
class Worker:
    """A function in a process, which starts with the first call.

    After NoAnswer and ProcessEnded the next call starts another process.

    Attributes:
      function: it can be pickled, and so can its arguments and results.
      variables: environment variables of the process, added to the ones of this process.
      stderr: file of what the process writes there; ProcessEnded has its last words.
    """

    function: Callable[..., Any]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stderr: Any = dataclasses.field(default_factory=tempfile.NamedTemporaryFile)
    _process: Any = None
    _connection: Any = None
    _closed: bool = False

    def __call__(self, *args: Any, seconds: float) -> Any:
        """function(*args), within so many seconds after the process has started.

        One call at a time.
        """
        try:
            if self._closed or self._process is None:
                self._start()
            self._connection.send(args)
            return self._answer(seconds)
        except BaseException as error:
            exit_code, self._process = self._end(), None
            if isinstance(error, EOFError | OSError):
                ended = f"the process ended with exit code {exit_code}"
                raise ProcessEnded(ended + self._last_words()) from None
            raise

    def close(self) -> None:
        """Ends the process, and a call that is running in another thread."""
        with _starting:
            self._closed = True
        self._end()

    def _start(self) -> None:
        self._connection, other = _SPAWN.Pipe()
        arguments = self.function, other, self.stderr.name
        process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        with _starting, environment(self.variables):
            if self._closed:
                raise ProcessEnded("the worker is closed")
            self.stderr.truncate(0)  # what the process before wrote
            process.start()
            self._process = process
        # The process has the only other end now: when it ends, so does the wait for an answer.
        other.close()
        self._answer(START_SECONDS)

    def _last_words(self) -> str:
        """An error that the process named, or the end of what it wrote."""
        with open(self.stderr.name, errors="replace") as file:
            text = file.read()
        [*_, text] = re.findall(r"(?:error: |LLVM ERROR|Assertion).{,200}", text) or [text]
        return f"; {' '.join(text.split())[-200:]}".rstrip("; ")

    def _answer(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise NoAnswer(f"no answer within {seconds:g} s")
        succeeded, answer = self._connection.recv()
        if not succeeded:
            raise ProcessEnded(answer + self._last_words())
        return answer

    def _end(self) -> int | None:
        """Its exit code, None if there is no process."""
        process = self._process
        if process is None:
            return None
        process.join(0.1)  # a process that has ended by itself keeps its exit code
        process.kill()
        process.join(10)
        return process.exitcode
