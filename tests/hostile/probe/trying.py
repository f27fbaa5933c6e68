"""What every attack is written with: a table of them, and a child of its own for each. Stdlib only; runs anywhere."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
REFUSALS = {errno.EPERM, errno.ENOSYS, errno.EACCES}
PATIENCE_S, ANSWER_S = 20.0, 3.0
PLANTED: dict[str, Any] = {}
"""Where the host's things are that an attack must not reach; empty where nothing was planted."""


class Refused(OSError):
    """It was not there, or not let in."""


@dataclass(frozen=True, slots=True)
class Attack:
    """`of_kernel`: what it reaches is the kernel it runs on, so a runtime with a kernel of its own may let it."""

    group: str
    name: str
    act: Callable[[], object]
    of_kernel: bool


ATTACKS: dict[str, Attack] = {}


def add(group: str, name: str, act: Callable[[], object], *, of_kernel: bool = False) -> None:
    if name in ATTACKS:
        raise ValueError(f"two attacks are called {name}")
    ATTACKS[name] = Attack(group, name, act, of_kernel)


def call(number: int, *arguments: object) -> int:
    """Refused when the kernel (or a filter) refuses outright; a complaint about arguments comes after that."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *words))
    code = ctypes.get_errno()
    if result == -1 and code in REFUSALS:
        raise Refused(code, os.strerror(code))
    return result


def must(number: int, *arguments: object) -> int:
    """The call has to work, not only to be looked at."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *words))
    if result == -1:
        raise Refused(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def planted(name: str) -> Any:
    if name not in PLANTED:
        raise Refused("nothing of that kind was planted")
    return PLANTED[name]


def answer_s() -> float:
    """How long somebody who is dialled has time to answer. Outside, where they must, they are told to have more."""
    return float(PLANTED.get("answer_s", ANSWER_S))


def opens(path: str, flags: int = os.O_RDONLY) -> Callable[[], None]:
    return lambda: os.close(os.open(path, flags))


def _child(act: Callable[[], object], told: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    text, code = "", 0
    try:
        act()
    except OSError as refused:
        code = 1
        text = errno.errorcode.get(refused.errno or 0, "") or str(refused) or "refused"
    except BaseException as broken:  # noqa: BLE001 - a forked child must never return
        code, text = 2, f"{type(broken).__name__}: {broken}"
    os.write(told, text.encode("utf-8", "replace")[:200])
    os._exit(code)


def attempt(act: Callable[[], object]) -> str:
    """ "reached", "refused: why" or "broken: why". In a child: an attack may be answered by death or by silence."""
    within_s = float(PLANTED.get("within_s", PATIENCE_S))
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        _child(act, told)
    os.close(told)
    try:
        ready, _, _ = select.select([heard], [], [], within_s)
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "refused: no answer"
        text = os.read(heard, 200).decode("utf-8", "replace")
    finally:
        os.close(heard)
    _, status = os.waitpid(child, 0)  # it says its word last
    if os.WIFSIGNALED(status):
        return f"refused: {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    return "reached" if code == 0 else f"refused: {text}" if code == 1 else f"broken: {text}"
