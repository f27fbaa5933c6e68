"""The work directory of a sandbox on the host: staging, collection, removal. Never follows a task's link."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.protocol import BadOutput, StagedInput
from gpool.core.errors import Invalid
from gpool.core.model import OutputFile
from gpool.core.specs.fields import checked_path, folded_path

MAX_OUTPUTS = 10_000
MAX_DEPTH = 100
MAX_NAMES_BYTES = 3 << 20  # all names go into one report
NAME_COST_BYTES = 100  # hash, size and mode of each
CHUNK_BYTES = 1 << 20
SHOWN_NAMES = 8
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class WorkDirectory:
    """`root` contains `work` (the task's) and for runners `values`; both belong to `uid` only. If it `stays`, it belongs to the
    agent and is reused.
    """

    root: Path
    uid: int
    stays: bool = False

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def values(self) -> Path:
        return self.root / "values"

    def make(self, *, with_values: bool = False) -> None:
        wanted = (self.work, self.values) if with_values else (self.work,)
        try:
            if not self.stays:
                self.root.mkdir(mode=0o711)
            self._make(wanted)
        except FileNotFoundError:  # the first use of a directory that stays
            self.root.mkdir(mode=0o711)
            self._make(wanted)
        except FileExistsError:  # an earlier removal was interrupted
            if not self.stays:
                raise
            self.remove()
            self._make(wanted)

    def _make(self, wanted: Sequence[Path]) -> None:
        for path in wanted:
            path.mkdir(mode=0o700)
            self._chown(path)

    def _chown(self, path: Path) -> None:
        if self.uid != os.geteuid():
            os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def stage(self, inputs: Sequence[StagedInput]) -> None:
        for staged in inputs:
            target = self.work
            parts = checked_path(staged.path).split("/")
            for name in parts[:-1]:
                target = target / name
                if not target.exists():
                    target.mkdir(mode=0o755)
                    self._chown(target)
            target = target / parts[-1]
            shutil.copyfile(staged.source, target)
            target.chmod(0o755 if staged.executable else 0o644)
            self._chown(target)

    def write_aside(self, name: str, text: str) -> None:
        path = self.root / name
        path.write_text(text)
        path.chmod(0o644)

    def copy_aside(self, name: str, source: Path) -> Path:
        """Copy a program of the agent for this sandbox alone: locks on a copy reach nobody else."""
        target = self.root / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
        for path in (target, *target.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return target

    def collect(self, wanted: Sequence[str], into: Path, quota_bytes: int) -> list[OutputFile]:
        collector = _Collector(self.uid, into, quota_bytes)
        with opened(self.work, None) as top:
            for path in wanted:
                try:
                    collector.collect(top, path)
                except (FileNotFoundError, NotADirectoryError, PermissionError) as changed:
                    raise BadOutput(
                        f"output '{shown(path)}' changed while it was collected; retry when the task no longer writes it"
                    ) from changed
        return collector.found

    def read_end(self, name: str, most_bytes: int) -> bytes:
        """Last bytes of a plain file of the task; empty for anything else. Opens no link and no FIFO."""
        try:
            with opened(self.work, None) as top:
                descriptor, facts = _regular(top, name, name, self.uid)
        except (BadOutput, OSError):
            return b""
        try:
            return os.pread(descriptor, most_bytes, max(0, facts.st_size - most_bytes))
        finally:
            os.close(descriptor)

    def take_value(self, name: str, into: Path, quota_bytes: int) -> Path:
        """Copy a runner's large value: the task may hold the original open."""
        with opened(self.values, None) as top:
            descriptor, facts = _regular(top, name, name, self.uid)
            target = into / f"value-{secrets.token_hex(8)}"
            with os.fdopen(descriptor, "rb", buffering=0) as source:
                if facts.st_size > quota_bytes:
                    raise BadOutput(f"a value of {facts.st_size} bytes is over the disk limit")
                _copy(source.fileno(), target, quota_bytes)
            os.unlink(name, dir_fd=top)
        return target

    def remove_if_empty(self) -> bool:
        """Remove the directory of a task that left nothing, and files aside; return False if there is more to remove."""
        try:
            self.work.rmdir()
        except OSError:
            return False
        for name in os.listdir(self.root):
            aside = self.root / name
            if not stat.S_ISREG(aside.lstat().st_mode):
                return False
            aside.unlink()
        if not self.stays:
            self.root.rmdir()
        return True

    def remove(self) -> None:
        """At any depth and permissions: directories are moved to the top first."""
        with contextlib.suppress(FileNotFoundError), opened(self.root, None) as top:
            empty(top)
        if not self.stays:
            with contextlib.suppress(FileNotFoundError):
                self.root.rmdir()


@contextlib.contextmanager
def opened(path: str | Path, above: int | None) -> Iterator[int]:
    descriptor = os.open(path, _DIRECTORY, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def shown(path: str) -> str:
    return path[:120].encode("unicode_escape").decode()


def _regular(above: int, name: str, path: str, uid: int) -> tuple[int, os.stat_result]:
    """Check the type before opening, so that nothing blocks."""
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        facts = os.fstat(held)
        if not stat.S_ISREG(facts.st_mode):
            raise BadOutput(f"output '{shown(path)}' is {kind_of(facts.st_mode)}; {_ADVICE}")
        if facts.st_uid != uid:
            raise BadOutput(f"output '{shown(path)}' belongs to another user; write it again")
        # O_NONBLOCK: a running task may hold an fcntl lease, and a plain open waits for its release.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{held}", flags), facts
        except PermissionError:
            os.chmod(f"/proc/self/fd/{held}", 0o600)  # the task removed its own right to read
            return os.open(f"/proc/self/fd/{held}", flags), facts
    except BlockingIOError as leased:
        raise BadOutput(
            f"output '{shown(path)}' is under a lease (fcntl); release it first"
        ) from leased
    finally:
        os.close(held)


_ADVICE = "only plain files can be outputs"


def kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFDIR: "a directory",
        stat.S_IFREG: "a plain file",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def _copy(source: int, target: Path, quota_bytes: int) -> tuple[str, int]:
    digest = hashlib.sha256()
    size = 0
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while chunk := os.read(source, CHUNK_BYTES):
            size += len(chunk)
            if size > quota_bytes:
                raise BadOutput(f"outputs are over the disk limit of {quota_bytes} bytes")
            digest.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(made, view) :]
    except BaseException:
        target.unlink()
        raise
    finally:
        os.close(made)
    return digest.hexdigest(), size


class _Collector:
    def __init__(self, uid: int, into: Path, quota_bytes: int) -> None:
        self.found: list[OutputFile] = []
        self._uid = uid
        self._into = into
        self._left_bytes = quota_bytes
        self._quota_bytes = quota_bytes
        self._names_bytes = 0
        self._names: dict[str, str] = {}  # by case-folded name
        self._taken: set[str] = set()

    def collect(self, top: int, path: str) -> None:
        wants_directory = path.endswith("/")
        try:
            parts = checked_path(path, directory=wants_directory).rstrip("/").split("/")
        except Invalid as bad:
            raise BadOutput(bad.detail) from bad
        above = os.dup(top)
        try:
            for at, name in enumerate(parts[:-1]):
                above = self._down(above, name, "/".join(parts[: at + 1]), path)
            if wants_directory:
                above = self._down(above, parts[-1], path, path)
                self._walk(above, "/".join(parts))
            else:
                self._file(above, parts[-1], path)
        finally:
            os.close(above)

    def _down(self, above: int, name: str, path: str, wanted: str) -> int:
        try:
            below = directory_at(above, name)
        except FileNotFoundError as missing:
            raise BadOutput(_missing(above, wanted)) from missing
        except OSError as other:
            kind = kind_of(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)
            raise BadOutput(
                f"output '{shown(wanted)}': '{shown(path)}' is {kind}, not a directory"
            ) from other
        os.close(above)
        return below

    def _walk(self, directory: int, path: str) -> None:
        # bounded depth: each level holds a descriptor
        if path.count("/") > MAX_DEPTH:
            raise BadOutput(
                f"output '{shown(path)}' lies more than {MAX_DEPTH} folders deep; put it into an archive"
            )
        for name in sorted(os.listdir(directory)):
            below = f"{path}/{name}"
            try:
                checked_path(below)
            except Invalid as bad:
                raise BadOutput(bad.detail) from bad
            facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                inner = directory_at(directory, name)
                try:
                    self._walk(inner, below)
                finally:
                    os.close(inner)
            else:
                self._file(directory, name, below)

    def _file(self, above: int, name: str, path: str) -> None:
        twin = self._names.setdefault(folded_path(path), path)
        if twin != path:
            raise BadOutput(
                f"outputs '{shown(twin)}' and '{shown(path)}' are one name on some machines"
            )
        if path in self._taken:
            return
        if len(self.found) >= MAX_OUTPUTS:
            raise BadOutput(f"more than {MAX_OUTPUTS} outputs; put them into one archive")
        self._names_bytes += len(path.encode()) + NAME_COST_BYTES
        if self._names_bytes > MAX_NAMES_BYTES:
            raise BadOutput(
                f"more than {len(self.found)} outputs with names this long; put them into one archive"
            )
        try:
            descriptor, facts = _regular(above, name, path, self._uid)
        except FileNotFoundError as missing:
            raise BadOutput(_missing(above, path)) from missing
        except BadOutput:
            if stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise BadOutput(
                    f"output '{shown(path)}' is a directory; ask for '{shown(path)}/'"
                ) from None
            raise
        try:
            if facts.st_size > self._left_bytes:
                raise BadOutput(
                    f"output '{shown(path)}' of {facts.st_size} bytes is over the disk limit of {self._quota_bytes}"
                )
            temporary = self._into / f"collecting-{secrets.token_hex(8)}"
            sha256, size = _copy(descriptor, temporary, self._left_bytes)
        finally:
            os.close(descriptor)
        temporary.rename(self._into / sha256)
        self._left_bytes -= size
        self._taken.add(path)
        self.found.append(OutputFile(path, sha256, size, bool(facts.st_mode & stat.S_IXUSR)))


def _missing(above: int, path: str) -> str:
    names = sorted(shown(name) for name in os.listdir(above))
    held = ", ".join(names[:SHOWN_NAMES]) + (" …" if len(names) > SHOWN_NAMES else "")
    return f"output '{shown(path)}' was not written; its directory holds {held or 'nothing'}"


def directory_at(above: int, name: str) -> int:
    """Open a directory even if the task removed its own rights to it."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=above)
    except PermissionError:
        held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            os.chmod(f"/proc/self/fd/{held}", 0o700)
        finally:
            os.close(held)
        return os.open(name, _DIRECTORY, dir_fd=above)


def clear(directories: Path, values: Path) -> None:
    for left in directories.iterdir():
        WorkDirectory(left, os.geteuid()).remove()
    for value in values.iterdir():
        value.unlink()


def empty(top: int) -> None:
    moved = 0
    pending = os.listdir(top)
    while pending:
        name = pending.pop()
        facts = os.stat(name, dir_fd=top, follow_symlinks=False)
        if not stat.S_ISDIR(facts.st_mode):
            os.unlink(name, dir_fd=top)
            continue
        directory = directory_at(top, name)
        try:
            if facts.st_mode & 0o700 != 0o700:
                os.fchmod(directory, 0o700)
            for inner in os.listdir(directory):
                below = os.stat(inner, dir_fd=directory, follow_symlinks=False)
                if not stat.S_ISDIR(below.st_mode):
                    os.unlink(inner, dir_fd=directory)
                    continue
                try:
                    os.rmdir(inner, dir_fd=directory)
                except OSError:
                    os.close(directory_at(directory, inner))
                    moved += 1
                    higher = f".moved-{moved}-{secrets.token_hex(4)}"
                    os.rename(inner, higher, src_dir_fd=directory, dst_dir_fd=top)
                    pending.append(higher)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=top)
