"""Process trees: descendants by /proc, and a supervisor whose command leaves none behind. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal

from gpool.agent.runtime.bubblewrap import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`: each sandbox is a fork of this memory
    from collections.abc import Callable
    from typing import NoReturn


def children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listing:
                found += [int(word) for word in listing.read().split()]
    return found


def descendants(root: int) -> list[int]:
    """Processes below `root`, nearest first. Races with forks: repeat until there are none."""
    found, wave = [], [root]
    while wave:
        below = [child for pid in wave for child in children(pid)]
        found += below
        wave = below
    return found


def reap_all_below(me: int) -> None:
    while True:
        for pid in descendants(me):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def exec_program(program: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(program[0], program, environment)
    except OSError as failure:
        missing = isinstance(failure, (FileNotFoundError, NotADirectoryError))
        os.write(2, f"gpool: {program[0]}: {failure.strerror}\n".encode())
        os._exit(127 if missing else 126)


def supervise(run: Callable[[], NoReturn]) -> NoReturn:
    """Run an unisolated command; its descendants die with it, with this process, or on SIGTERM."""
    kernel.prctl("subreaper", kernel.PR_SET_CHILD_SUBREAPER, 1)
    wanted = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    kernel.prctl("death signal", kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher = os.getppid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
        os.setsid()
        run()
    os.closerange(0, 1024)  # the command's pipes must end with the command
    status = 9
    while os.getppid() == launcher:
        if signal.sigwait(wanted) == signal.SIGTERM:
            break
        ended = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, state = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == child:
                    status, ended = state, True
        if ended:
            break
    reap_all_below(os.getpid())
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
