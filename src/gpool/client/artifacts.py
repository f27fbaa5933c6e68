"""Upload of inputs and download of outputs by SHA-256, streamed; deletion and export of an account's data.

Writes nothing outside the given folder.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from gpool.client.transport import ApiTransport
from gpool.client.values import OutputArtifact
from gpool.core.errors import Conflict, GpoolError, Invalid, TooLarge, Unreachable
from gpool.core.specs.fields import checked_path, folded_path
from gpool.transfer.artifacts import download, upload
from gpool.transfer.requests import FilePart, Landing, Steps, hash_of, path_of

log = logging.getLogger(__name__)

EXPORT_READ_S = 300.0

TransferProgress = Callable[[str, int, int], None]
"""Called with (path, bytes done, total bytes)."""


def _silent(_path: str, _done: int, _total: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: str
    source: Path
    size_bytes: int
    executable: bool


Input = str | os.PathLike[str] | LocalFile


def gather(inputs: Iterable[Input], root: Path | None = None) -> list[LocalFile]:
    """List files, folders recursively, relative to `root`; a `LocalFile` keeps its path."""
    base = (root or Path()).absolute()
    found: dict[str, LocalFile] = {}
    for given in inputs:
        if isinstance(given, LocalFile):
            _add(found, given)
            continue
        source = Path(os.path.normpath(base / given))
        if not source.is_relative_to(base):
            raise Invalid(
                f"input '{given}' lies outside {base}; run gpool from a folder above it, "
                "or copy it here: inputs keep their relative paths"
            )
        files = list(_walk(source, given))
        for file in files:
            name = checked_path(file.relative_to(base).as_posix())
            about = file.stat()
            executable = bool(about.st_mode & stat.S_IXUSR)
            _add(found, LocalFile(name, file, about.st_size, executable))
        if not files:
            log.warning(
                "input '%s' holds no file and is not sent; if the task needs the empty folder, let the command create it",
                given,
            )
    seen: dict[str, str] = {}
    for name in found:
        other = seen.setdefault(folded_path(name), name)
        if other != name:
            raise Invalid(f"inputs '{other}' and '{name}' differ only in case; rename one of them")
    return list(found.values())


def _add(found: dict[str, LocalFile], file: LocalFile) -> None:
    other = found.setdefault(file.path, file)
    if other.source.resolve() != file.source.resolve():
        raise Invalid(
            f"'{other.source}' and '{file.source}' would both become '{file.path}'; leave one out"
        )


def _walk(source: Path, given: str | os.PathLike[str]) -> Iterator[Path]:
    if source.is_dir():
        real = source.resolve()
        try:
            yield from _files_in(source, f"in input '{given}'", real, (real,))
        except OSError as exc:
            what = f"'{exc.filename}' (in input '{given}')"
            raise Invalid(f"{what} cannot be read: {exc.strerror}") from exc
    elif source.is_file():
        yield source
    elif source.exists():
        raise Invalid(f"input '{given}' is neither a file nor a folder")
    else:
        raise Invalid(f"input '{given}' does not exist")


def _files_in(
    folder: Path, where: str, real_top: Path, entered: tuple[Path, ...]
) -> Iterator[Path]:
    """A link out of `real_top` is refused. `entered`: real paths above, to detect cycles."""
    for name in sorted(os.listdir(folder)):
        file = folder / name
        if file.is_symlink() and not file.exists():
            raise Invalid(f"'{file}' ({where}) is a link to nothing; remove it")
        real = file.resolve()
        if not real.is_relative_to(real_top):
            raise Invalid(
                f"'{file}' ({where}) is a link out of it, to {real}; copy the target, or remove the link"
            )
        if file.is_dir():
            if real in entered:
                raise Invalid(f"'{file}' ({where}) is a link to a folder it lies in; remove it")
            yield from _files_in(file, where, real_top, (*entered, real))
        elif file.is_file():
            yield file
        else:
            raise Invalid(f"'{file}' ({where}) is not a plain file; remove it")


def check_sent(command: Sequence[str], files: Iterable[LocalFile], outputs: Sequence[str]) -> None:
    """Refuse a program that lies here and is not sent; warn about other local files that the command names."""
    sent = {file.path for file in files} | set(outputs)
    words = dict.fromkeys(str(word).rpartition("=")[2] or str(word) for word in command)
    unsent = [word for word in words if _is_here(word) and os.path.normpath(word) not in sent]
    if not unsent:
        return
    hint = (
        f"{' and '.join(unsent[:3])}: present here, but not sent to the task. "
        f"Add --input {unsent[0]} (in Python inputs=[{unsent[0]!r}]), or --workdir . to send this folder"
    )
    if unsent[0] == command[0]:
        raise Invalid(hint)
    log.warning("%s", hint)


def _is_here(word: str) -> bool:
    """A bare first word is a program in the node's PATH, unless a file here has its name and a suffix."""
    is_path = "/" in word or "." in word
    return is_path and not os.path.isabs(word) and len(word) < 1024 and os.path.isfile(word)


class Artifacts:
    def __init__(self, api: ApiTransport) -> None:
        self._api = api
        self._uploaded: set[str] = set()

    def put(self, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self._uploaded:
            self._api.carry_out(lambda: upload(content, sha256, len(content)))
            self._uploaded.add(sha256)
        return sha256

    def forget(self, sha256s: Iterable[object]) -> bool:
        """True if any was believed present."""
        gone = self._uploaded.intersection(sha256s)
        self._uploaded -= gone
        return bool(gone)

    def put_file(self, file: LocalFile, progress: TransferProgress = _silent) -> str:
        """Upload in parts with constant memory, resuming after a break; return the hash."""
        try:
            sha256, size_bytes = hash_of(file.source)
        except OSError as exc:
            raise Invalid(f"input '{file.path}' cannot be read: {exc.strerror}") from exc
        if sha256 not in self._uploaded:
            self._api.carry_out(
                lambda: _reporting(upload(file.source, sha256, size_bytes), file, progress)
            )
            self._uploaded.add(sha256)
        progress(file.path, size_bytes, size_bytes)
        return sha256

    def get(self, sha256: str, most_bytes: int | None = None) -> bytes | bytearray:
        """Download into memory: for values, not for files. `TooLarge` before more than `most_bytes` are read."""
        if most_bytes is None:
            return self._api.send("GET", path_of(sha256)).body
        pauses = self._api.pauses()
        while True:
            try:
                return self._bounded(sha256, most_bytes)
            except Unreachable:
                pause = next(pauses, None)
                if pause is None or self._api.wait(pause):
                    raise

    def _bounded(self, sha256: str, most_bytes: int) -> bytearray:
        content = bytearray()
        with self._api.open(path_of(sha256)) as response:
            for piece in response.iter_bytes():
                if len(content) + len(piece) > most_bytes:
                    raise TooLarge(f"artifact {sha256} has more than {most_bytes} bytes")
                content += piece
        return content

    def fetch(
        self, outputs: Sequence[OutputArtifact], into: Path, progress: TransferProgress = _silent
    ) -> list[Path]:
        """Replace existing files beneath `into`; return their paths."""
        try:
            into.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise Conflict(f"'{into}' cannot be written to: {exc.strerror}") from exc
        written = []
        for output in outputs:
            name = checked_path(output.path)
            with OutputFolder.beneath(into, name.split("/")[:-1]) as folder:
                written.append(into / name)
                self._fetch_one(output, folder, name.rpartition("/")[2], progress)
        return written

    def _fetch_one(
        self, output: OutputArtifact, folder: OutputFolder, name: str, progress: TransferProgress
    ) -> None:
        short = name.encode()[:100].decode(errors="ignore")
        partial = f".{short}.{output.sha256[:16]}.part"
        try:
            with folder.open(partial) as file:
                landing = Landing(file, lambda done: progress(output.path, done, output.size_bytes))
                self._api.carry_out(lambda: download(output.sha256, landing))
                mask = os.umask(0)
                os.umask(mask)
                if hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), (0o777 if output.executable else 0o666) & ~mask)
            folder.replace(partial, name)
        except IsADirectoryError as exc:
            folder.unlink(partial)
            raise Conflict(
                f"output '{output.path}' cannot be written: a folder of that name is there"
            ) from exc
        except OSError as exc:
            raise Conflict(f"output '{output.path}' cannot be written: {exc.strerror}") from exc
        except GpoolError:
            if not folder.size_bytes(partial):  # nothing to resume from
                folder.unlink(partial)
            raise


def _reporting(steps: Steps, file: LocalFile, progress: TransferProgress) -> Steps:
    request = next(steps)
    while True:
        if isinstance(request.body, FilePart):
            progress(file.path, request.body.offset, file.size_bytes)
        reply = yield request
        try:
            request = steps.send(reply)
        except StopIteration:
            return


_HAS_DESCRIPTORS = {os.open, os.mkdir, os.unlink, os.stat} <= os.supports_dir_fd
"""Whether files can be named relative to an open folder, which nobody can replace by a link meanwhile. Not on Windows."""

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


class OutputFolder:
    """A folder that outputs are written into, open while they are."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path, self._descriptor = path, descriptor

    @classmethod
    def beneath(cls, root: Path, names: Sequence[str]) -> OutputFolder:
        """Create missing folders; refuse a link on the way."""
        try:
            current = cls._opened(root, root, None)
        except OSError as exc:
            raise Conflict(f"'{root}' cannot be written to: {exc.strerror}") from exc
        for name in names:
            try:
                with suppress(FileExistsError):
                    os.mkdir(current._of(name), dir_fd=current._descriptor)
                deeper = cls._opened(current._path / name, name, current)
            except OSError as exc:
                in_the_way = exc.errno in (errno.ENOTDIR, errno.ELOOP)
                why = f"'{name}' is a link or a file" if in_the_way else exc.strerror
                raise Conflict(
                    f"'{'/'.join(names)}' beneath {root} cannot be written to: {why}"
                ) from exc
            finally:
                current.close()
            current = deeper
        return current

    @classmethod
    def _opened(cls, path: Path, name: str | Path, above: OutputFolder | None) -> OutputFolder:
        if not _HAS_DESCRIPTORS:
            places = [os.path.normcase(str(one)) for one in (path.resolve(), path.absolute())]
            is_link = above is not None and places[0] != places[1]
            if is_link or not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a link or a file", str(path))
            return cls(path.resolve(), None)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if above is None:
            return cls(path, os.open(path, flags))
        return cls(path, os.open(name, flags | os.O_NOFOLLOW, dir_fd=above._descriptor))

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _of(self, name: str) -> str:
        return name if self._descriptor is not None else str(self._path / name)

    def open(self, name: str) -> BinaryIO:
        flags = os.O_RDWR | os.O_CREAT | _FLAGS
        return os.fdopen(os.open(self._of(name), flags, 0o600, dir_fd=self._descriptor), "r+b")

    def replace(self, name: str, by: str) -> None:
        at = self._descriptor
        if at is None:
            os.replace(self._of(name), self._of(by))
        else:
            os.replace(name, by, src_dir_fd=at, dst_dir_fd=at)

    def unlink(self, name: str) -> None:
        os.unlink(self._of(name), dir_fd=self._descriptor)

    def size_bytes(self, name: str) -> int:
        return os.stat(self._of(name), dir_fd=self._descriptor).st_size


class OwnData:
    """Data that an account keeps in the pool; part of `Client` as `client.data`."""

    def __init__(self, api: ApiTransport) -> None:
        self._api = api

    def delete(self, id: str) -> None:
        """Delete an ended task (t-…), or a batch (b-…) whose tasks have all ended, with arguments, results and logs."""
        kind = {"t-": "tasks", "b-": "batches"}.get(id[:2])
        if kind is None:
            raise Invalid(f"{id[:40]!r} is neither a task (t-…) nor a batch (b-…)")
        self._api.send("DELETE", f"/v1/{kind}/{quote(id, safe='')}/record")

    def artifacts(self, limit: int = 50) -> dict[str, Any]:
        """Largest artifacts of the account, with `used_bytes`: what its storage quota is charged for in all."""
        found: dict[str, Any] = self._api.get_json(f"/v1/artifacts?limit={max(1, min(limit, 200))}")
        return found

    def storage(self, team: str | None = None) -> dict[str, Any]:
        """Bytes charged to the storage quota by use, of the account or of a team (its id)."""
        query = f"?team={quote(team, safe='')}" if team else ""
        found: dict[str, Any] = self._api.get_json(f"/v1/storage{query}")
        return found

    def delete_artifact(self, sha256: str) -> None:
        """Delete an upload, finished or not, that no task uses."""
        self._api.send("DELETE", f"/v1/artifacts/{quote(sha256, safe='')}")

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write the account's data to a new file, one JSON object a line; return the number of lines.

        A file that exists is not overwritten (`FileExistsError`).
        """
        lines = 0
        target = Path(file)
        partial = target.with_name(target.name + ".part")
        opened = self._api.open("/v1/me/export", read_s=EXPORT_READ_S)
        with opened as answer, partial.open("wb") as out:
            for piece in answer.iter_bytes():
                out.write(piece)
                lines += piece.count(b"\n")
        os.link(partial, target)
        partial.unlink()
        return lines

    def delete_account(self, *, password: str | None = None, name: str | None = None) -> None:
        """Delete the account. `password` confirms it; an account without a password is confirmed by its `name`."""
        members = {"password": password, "name": name}
        self._api.send_json(
            "DELETE", "/v1/me", {key: value for key, value in members.items() if value is not None}
        )
