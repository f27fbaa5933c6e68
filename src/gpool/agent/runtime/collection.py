"""Moves a built directory (an environment) out of a work directory into the agent's ownership.

Every process of the sandbox has ended by then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from gpool.agent.runtime.protocol import BadOutput
from gpool.agent.runtime.work_directory import directory_at, empty, kind_of, opened, shown
from gpool.core.errors import Invalid
from gpool.core.specs.fields import checked_path

MOST_DEPTH = 200
READABLE, RUNNABLE = 0o444, 0o555
DIRECTORY_MODE = 0o755


def take(work: Path, directory: str, to: Path, uid: int) -> None:
    """Move `directory` beneath `work` to `to`, which must not exist and lie on the same file system.

    Follows no link. Every entry must belong to `uid`; afterwards the agent owns all, files are read-only, nothing is setuid.
    Raises `BadOutput` (special files too), after removing the directory.
    """
    try:
        parts = checked_path(directory).split("/")
    except Invalid as bad:
        raise BadOutput(bad.detail) from bad
    name = f".collecting-{secrets.token_hex(8)}"
    with opened(to.parent, None) as target:
        with contextlib.ExitStack() as held:
            above = held.enter_context(opened(work, None))
            try:
                for part in parts[:-1]:
                    above = held.enter_context(opened(part, above))
                inner = directory_at(above, parts[-1])  # never a link
                held.callback(os.close, inner)
                os.fchmod(inner, 0o700)  # moving a directory needs the right to write it
                os.rename(parts[-1], name, src_dir_fd=above, dst_dir_fd=target)
            except (FileNotFoundError, NotADirectoryError) as missing:
                raise BadOutput(f"there is no directory '{shown(directory)}'") from missing
        try:
            with opened(name, target) as top:
                _own(top, uid)
            os.rename(name, to.name, src_dir_fd=target, dst_dir_fd=target)
        except BaseException:
            with opened(name, target) as top:
                empty(top)
            os.rmdir(name, dir_fd=target)
            raise


def _own(top: int, uid: int) -> None:
    mine = set[tuple[int, int]]()  # files with several names that were handled already
    _own_directory(top, uid, mine, "", 0)


def _own_directory(
    directory: int, uid: int, mine: set[tuple[int, int]], path: str, depth: int
) -> None:
    # depth first: a directory is sealed after its contents
    if depth > MOST_DEPTH:
        raise BadOutput(f"'{shown(path)}' lies deeper than {MOST_DEPTH} directories")
    _must_be_of(os.fstat(directory), uid, path)
    for name in os.listdir(directory):
        below = f"{path}/{name}"
        facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            inner = directory_at(directory, name)
            try:
                _own_directory(inner, uid, mine, below, depth + 1)
            finally:
                os.close(inner)
            continue
        if (facts.st_dev, facts.st_ino) in mine:
            continue
        _must_be_of(facts, uid, below)
        if stat.S_ISREG(facts.st_mode):
            _own_file(directory, name, facts)
            if facts.st_nlink > 1:
                mine.add((facts.st_dev, facts.st_ino))
        elif stat.S_ISLNK(facts.st_mode):
            os.chown(name, os.geteuid(), os.getegid(), dir_fd=directory, follow_symlinks=False)
        else:
            raise BadOutput(f"'{shown(below)}' is {kind_of(facts.st_mode)}")
    os.fchown(directory, os.geteuid(), os.getegid())
    os.fchmod(directory, DIRECTORY_MODE)


def _own_file(directory: int, name: str, facts: os.stat_result) -> None:
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        itself = f"/proc/self/fd/{held}"
        os.chown(itself, os.geteuid(), os.getegid())
        os.chmod(itself, RUNNABLE if facts.st_mode & stat.S_IXUSR else READABLE)
    finally:
        os.close(held)


def _must_be_of(facts: os.stat_result, uid: int, path: str) -> None:
    if facts.st_uid != uid:
        raise BadOutput(f"'{shown(path)}' belongs to another user than the sandbox's")
