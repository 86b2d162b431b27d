"""The command line of all programs: flags, --help, and errors that are one line.

The exit code of every program is 2 where a flag is wrong or a request makes no sense, with a line
on stderr that names the flag, 130 after Ctrl-C, and 1 where a result is not finite or a file or
stdout cannot be written.
"""

import contextlib
import errno
import functools
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import extras  # noqa: F401
import shapes
from absl import flags

try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None

flags.disclaim_key_flags()  # the flags defined here are those of the program


class RequestError(ValueError):
    """The request makes no sense here; the message is for the user."""


class FunctionParser(flags.ArgumentParser):
    """One value, parsed by a function that may raise ValueError."""

    def __init__(self, parse):
        super().__init__()
        self.parse = parse


@contextlib.contextmanager
def naming(flag):
    """An error about a file or a value becomes a RequestError that names the flag."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise RequestError(f"--{flag}: {error}") from None


def open_alone(flag, path):
    """Opens a file to append to, or raises RequestError while another process has it open so.

    The kernel ends the lock with the process, however it ends. Windows and some file systems have
    no such lock; then a line on stderr says so.
    """
    with naming(flag), contextlib.ExitStack() as files:
        file = files.enter_context(open(path, "a", encoding="utf-8"))
        try:
            if Path(path).is_file():  # others, such as /dev/null, may be shared
                lock(file)
        except BlockingIOError:
            raise ValueError(f"another run is writing {path}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            reason = f"{path} cannot be locked ({error.strerror})"
            print(f"{reason}: nothing protects it from a second run", file=sys.stderr)
        files.pop_all()
        return file


NO_LOCKS = errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK


def lock(file):
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def printable(text):
    """The text with escapes in place of the characters that stdout cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def check_temperature(values):
    """--temperature is 0 or a number by which float32 can divide logits."""
    message = "expected 0, or a number from 1e-30 to 1e30"
    flags.register_validator("temperature", lambda x: x == 0 or 1e-30 <= x <= 1e30, message, values)


def known_name(known, text):
    if text not in known:
        raise ValueError(f"unknown {text}, known are {', '.join(known)}")
    return text


SHARED = {
    "shape": ("items", [], shapes.parse, f"{shapes.KNOWN}."),
    "direction": ("names", ["fwd"], ("fwd", "fwbw"), "forward, forward and backward."),
    "dtype": ("names", ["bfloat16"], ("bfloat16", "float16", "float32"), "the dtype of q, k, v."),
    "repeats": ("integer", 10, "Batches of calls; the median counts.", 1),
    "commit": ("string", None, "For the rows; none: the HEAD of the git working tree."),
    "from_jsonl": ("list", [], "Measure nothing; report the rows of these files."),
    "jsonl": ("string", None, "File to append each row to as it is measured."),
    "plot": ("string", None, "PNG, PDF or SVG to write at the end."),
}


class Define:
    """Defines flags: ``define.string("plot", None, help)`` is flags.DEFINE_string."""

    def __init__(self, values):
        self._values = values

    def __getattr__(self, kind):
        return functools.partial(getattr(flags, f"DEFINE_{kind}"), flag_values=self._values)

    def parsed(self, name, parse, about, default=None):
        """A flag whose value a function makes of the text or the default; none: None."""
        flags.DEFINE(FunctionParser(parse), name, default, about, self._values)

    def items(self, name, default, parse, about):
        """A comma-separated list of items, or a default list of texts."""

        def parse_all(x):
            return [parse(item) for item in (x.split(",") if isinstance(x, str) else x)]

        self.parsed(name, parse_all, about, default)

    def names(self, name, default, known, about):
        """A list of known names."""
        parse = functools.partial(known_name, tuple(known))
        self.items(name, default, parse, f"{', '.join(known)}: {about}")

    def shared(self, *names, **defaults):
        """Flags of ``SHARED``, some with another default."""
        for name in (*names, *defaults):
            kind, default, *arguments = SHARED[name]
            getattr(self, kind)(name, defaults.get(name, default), *arguments)


def help_text(about, values):
    """The docstring of a program up to its examples, and its flags with their defaults."""
    paragraphs = about.strip().split("\n\n")
    examples = next((n for n, x in enumerate(paragraphs, 1) if x.startswith("  ")), 1)
    lines = ["\n\n".join(paragraphs[:examples]), ""]
    for module, defined in values.flags_by_module_dict().items():
        for flag in defined if not module.startswith("absl") else ():
            x = flag.default_unparsed
            x = ",".join(x) if isinstance(x, list | tuple) else "" if x is None else str(x)
            name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
            text = f"{name}={x}" if x and not flag.boolean else name
            indents = dict(initial_indent="  ", subsequent_indent=" " * 8)
            lines += textwrap.wrap(f"{text}  {flag.help}", 98, **indents)
    return "\n".join(lines)


def run(argv, values, start, refused=RequestError, about=""):
    """Runs a program with these arguments; returns its exit code: ``start``'s, 2 or 130.

    refused: an exception whose message is for the user, as that of RequestError is.
    about: the docstring of the program.
    """

    if sys.stderr is None:  # it is closed, and print would write to stdout instead
        sys.stderr = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115

    def code_of_start():
        if sys.stdout is None:
            raise RequestError("stdout is closed, expected a file or a pipe")
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
            sys.stdout.reconfigure(errors="backslashreplace")
        if {"--help", "-h"} & {*argv[1:]}:
            return print(help_text(about or "", values))
        if others := values(argv)[1:]:
            raise RequestError(f"unexpected argument {others[0]}, expected --FLAG=VALUE")
        if wrong := [name for name, x in values.flag_values_dict().items() if x != x]:
            raise RequestError(f"--{wrong[0]}=nan, expected a number")
        return start(values)

    try:
        code = code_of_start() or 0
        sys.stdout.flush()
        return code
    except (flags.Error, RequestError, refused) as error:
        code, message = 2, str(error)
    except (FloatingPointError, OSError) as error:
        lost = not can_flush(sys.stdout) or isinstance(error, BrokenPipeError)
        code, message = 1, f"cannot write to stdout: {error}" if lost else str(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"{Path(argv[0]).stem}: {' '.join(message.split())}", file=sys.stderr)
    return code


def can_flush(file):
    """Whether that is so; if not, nothing that is written there from now on fails again."""
    try:
        file.flush()
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        return False


def main(define_flags, start):
    """Runs the program that this process is."""
    values = flags.FlagValues()
    define_flags(Define(values))
    sys.exit(run(sys.argv, values, start, about=sys.modules["__main__"].__doc__))


def one_line(error):
    text, _, _ = f"{type(error).__name__}: {error}".partition("Repro command")
    return " ".join(text.split())[:300]


def git_commit():
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__))]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
