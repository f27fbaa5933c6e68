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
from typing import Any
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
            folder = _folder_beneath(into, name.split("/")[:-1])
            try:
                written.append(into / name)
                self._fetch_one(output, folder, name.rpartition("/")[2], progress)
            finally:
                os.close(folder)
        return written

    def _fetch_one(
        self, output: OutputArtifact, folder: int, name: str, progress: TransferProgress
    ) -> None:
        short = name.encode()[:100].decode(errors="ignore")
        partial = f".{short}.{output.sha256[:16]}.part"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(partial, flags, 0o600, dir_fd=folder), "r+b") as file:
                landing = Landing(file, lambda done: progress(output.path, done, output.size_bytes))
                self._api.carry_out(lambda: download(output.sha256, landing))
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(file.fileno(), (0o777 if output.executable else 0o666) & ~mask)
            os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError as exc:
            os.unlink(partial, dir_fd=folder)
            raise Conflict(
                f"output '{output.path}' cannot be written: a folder of that name is there"
            ) from exc
        except OSError as exc:
            raise Conflict(f"output '{output.path}' cannot be written: {exc.strerror}") from exc
        except GpoolError:
            if not os.stat(partial, dir_fd=folder).st_size:  # nothing to resume from
                os.unlink(partial, dir_fd=folder)
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


def _folder_beneath(root: Path, names: Sequence[str]) -> int:
    """Create missing folders; refuse a link on the way."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        current = os.open(root, flags)
    except OSError as exc:
        raise Conflict(f"'{root}' cannot be written to: {exc.strerror}") from exc
    for name in names:
        try:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=current)
            deeper = os.open(name, flags | os.O_NOFOLLOW, dir_fd=current)
        except OSError as exc:
            in_the_way = exc.errno in (errno.ENOTDIR, errno.ELOOP)
            why = f"'{name}' is a link or a file" if in_the_way else exc.strerror
            raise Conflict(
                f"'{'/'.join(names)}' beneath {root} cannot be written to: {why}"
            ) from exc
        finally:
            os.close(current)
        current = deeper
    return current


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
