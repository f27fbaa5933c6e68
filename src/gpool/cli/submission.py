"""Parts of a submission that `gpool run` reads here: script, standard input, variables, secrets."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpool.core.errors import Invalid

if TYPE_CHECKING:
    from gpool.client.artifacts import LocalFile

STDIN_FILE = ".gpool-stdin"
"""Name of the sent standard input in the task's work directory."""


@dataclass(frozen=True, slots=True)
class SentInput:
    file: LocalFile

    def redirected(self, command: tuple[str, ...]) -> tuple[str, ...]:
        return ("sh", "-c", f'exec "$@" < {STDIN_FILE}', "sh", *command)


@contextmanager
def standard_input(wanted: bool) -> Iterator[SentInput | None]:
    """Standard input in a temporary file if `wanted`; `Invalid` if it has data and is not wanted.

    A caller that is not asked for its input would lose it silently: `echo hi | gpool run -- cat`.
    """
    if not wanted:
        if unread_input():
            raise Invalid(
                "standard input has data, and it is not sent to the task; "
                "add --stdin to send it, or < /dev/null to run without it"
            )
        yield None
        return
    from gpool.client.artifacts import LocalFile

    # A file of its own folder: Windows opens no file twice that is deleted on close.
    with tempfile.TemporaryDirectory(prefix="gpool-stdin-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield SentInput(LocalFile(STDIN_FILE, path, path.stat().st_size, False))


def unread_input() -> bool:
    """Return whether standard input is a file or pipe with bytes to read; False for a terminal and for no input.

    On Windows False for a pipe too: its bytes cannot be counted without reading them.
    """
    try:
        number = sys.stdin.fileno()
        facts = os.fstat(number)
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return False
    if stat.S_ISREG(facts.st_mode):
        return os.lseek(number, 0, os.SEEK_CUR) < facts.st_size
    if not (stat.S_ISFIFO(facts.st_mode) or stat.S_ISSOCK(facts.st_mode)):
        return False
    try:
        import fcntl
        import termios
    except ImportError:
        return False
    (size,) = struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, b"\0" * 4))
    return bool(size)


def script_of(command: tuple[str, ...], workdir: Path | None) -> LocalFile | None:
    base = Path(os.path.normpath(Path() if workdir is None else workdir)).absolute()
    here = Path(os.path.normpath(Path(command[0]).absolute()))
    there = Path(os.path.normpath(base / command[0]))
    source = next((file for file in (there, here) if file.suffix == ".py" and file.is_file()), None)
    if source is None:
        return None
    from gpool.client.artifacts import LocalFile

    is_inside = source.is_relative_to(base)
    name = source.relative_to(base).as_posix() if is_inside else source.name
    about = source.stat()
    return LocalFile(name, source, about.st_size, bool(about.st_mode & stat.S_IXUSR))


def variables(given: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name:
            raise Invalid(f"--env {one!r} has no name; write --env NAME=VALUE")
        if not equals:
            if name not in os.environ:
                raise Invalid(
                    f"--env {name}: no such variable in your environment; write --env {name}=VALUE"
                )
            value = os.environ[name]
        found[name] = value
    return found


def secrets(given: tuple[str, ...]) -> dict[str, str | None]:
    """`K` (the caller's variable, else None: the stored secret) or `K=@FILE`; `K=VALUE` is refused: command lines are public."""
    found: dict[str, str | None] = {}
    for one in given:
        name, equals, source = one.partition("=")
        if not name or (equals and not source.startswith("@")):
            raise Invalid(
                f"--secret {name or one[:20]!r}: write --secret NAME (from your environment, or stored with "
                "gpool secret set) or --secret NAME=@FILE; "
                "a value on the command line is visible to every user of this machine"
            )
        if equals:
            try:
                found[name] = Path(source[1:]).read_text().removesuffix("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise Invalid(f"--secret {name}: {source[1:]} cannot be read: {error}") from None
        else:
            found[name] = os.environ.get(name)
    return found
