"""Calls of a function in another process, with a time limit: LLVM ends its process on an assertion.

This module imports no jax: a process imports what its function needs, with environment variables of
its own.
"""

import multiprocessing
import os
import re
import tempfile

from command import one_line

_SPAWN = multiprocessing.get_context("spawn")


class ProcessEnded(RuntimeError):
    """A call raised, ended its process or took too long; the message says which."""


def _serve(function, connection, stderr):
    with open(stderr, "ab") as file:
        os.dup2(file.fileno(), 2)
    while True:
        try:
            answer = True, function(*connection.recv())
        except EOFError:
            return
        except Exception as error:
            answer = False, one_line(error)
        connection.send(answer)


class Worker:
    """A function in a process, which starts with the first call and anew after ProcessEnded.

    Args:
      function: it can be pickled, and so can its arguments and results.
      variables: environment variables of the process, added to the ones of this process.
    """

    def __init__(self, function, variables=None):
        self._function, self._variables = function, variables or {}
        self._process = None

    def __call__(self, *args, seconds):
        """function(*args); seconds include those in which the process starts."""
        if self._process is None:
            self._start()
        try:
            self._connection.send(args)
            if not self._connection.poll(seconds):
                raise ProcessEnded(f"no answer within {seconds:g} s")
            succeeded, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            succeeded, answer = False, f"the process ended with exit code {self._process.exitcode}"
        except BaseException:
            self.close()
            raise
        if not succeeded:
            self.close()
            raise ProcessEnded(answer + self._last_words())
        return answer

    def close(self):
        if self._process is not None:
            self._process.kill()
        self._process = None

    def _start(self):
        self._stderr = tempfile.NamedTemporaryFile()  # noqa: SIM115, until the next one
        self._connection, other = _SPAWN.Pipe()
        arguments = self._function, other, self._stderr.name
        self._process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        # The other variables stay where they are in memory: XLA's threads may be reading them.
        before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        self._process.start()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        other.close()  # the process has the only other end: when it ends, so does a wait for it

    def _last_words(self):
        """An error that the process named, or the end of what it wrote."""
        text = self._stderr.read().decode(errors="replace")
        [*_, text] = re.findall(r"(?:error: |LLVM ERROR|Assertion).{,200}", text) or [text]
        return f"; {' '.join(text.split())[-200:]}".rstrip("; ")
