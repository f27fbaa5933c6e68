"""Backup of a pool into one encrypted file: the store in one snapshot, key files, artifacts. The server keeps serving.

Artifacts are files that never change but may be deleted while the backup runs. So each is first linked into a folder of
the backup. If one is missing then, a new snapshot is taken, which does not name what was deleted meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.model import Instant
from gpool.observability.logs import get_logger
from gpool.server.blobs.stores import FolderStore, is_in_folder
from gpool.server.identity.envelope import Envelope, FieldLocation, MasterKey, WrappedKey
from gpool.server.recovery.archive import (
    SCRYPT,
    ArchivedKey,
    ArchiveEnd,
    ArchiveWriter,
    ArtifactHead,
    BackupManifest,
    FileData,
    TableHead,
    TableRows,
    checked_passphrase,
)
from gpool.server.recovery.snapshots import StoreSnapshot, known_revision, open_snapshot
from gpool.server.server import VERSION
from gpool.server.settings import Settings
from gpool.server.store.drivers.shared import TableColumns
from gpool.server.store.operations.identity import sealed_fields

log = get_logger(__name__)

MASTER_KEY, ROOT_KEY = "master.key", "server.key"
KEY_FILES = (ROOT_KEY, "server.pem", "operator.key")
"""Files of the data directory that a pool cannot be the same without, besides the master key."""

LEFT_OUT = frozenset(
    {"alembic_version", "changes", "replicas", "node_connections", "readings", "used_proofs"}
)
"""Tables about running processes; the revision is in the manifest."""

SNAPSHOTS = 5
"""Snapshots that a backup takes until every artifact of one is there."""

BATCH_BYTES = 1 << 20
READ_BYTES = 1 << 18
SHARED_SECRETS = {"root": ROOT_KEY, "certificate": "server.pem", "operator": "operator.key"}
"""Names in `server_secrets`, and the files from which a server without replicas reads the same."""


class _Artifact(NamedTuple):
    sha256: str
    object: str = ""  # empty in rows of earlier versions: the SHA-256

    @property
    def key(self) -> str:
        return self.object or self.sha256

    @property
    def in_bucket(self) -> bool:
        return not is_in_folder(self.key)


@dataclass(frozen=True, slots=True)
class BackupRequest:
    """`with_bucket`: read artifacts of the object store into the archive too."""

    settings: Settings
    file: Path
    passphrase: str = field(repr=False)
    with_bucket: bool = False
    cost: tuple[int, int, int] = SCRYPT


@dataclass(frozen=True, slots=True)
class BackupSummary:
    at: Instant
    rows: int
    tasks: int
    artifacts: int
    in_bucket: int  # artifacts that stay in the object store
    lost: tuple[str, ...]
    has_master_key: bool
    size_bytes: int


async def back_up(request: BackupRequest, now: Callable[[], Instant]) -> BackupSummary:
    """Write the archive; the file appears under its name when it is complete. `Conflict` if it exists."""
    checked_passphrase(request.passphrase)
    if request.file.exists():
        raise Conflict(f"{request.file} exists; give a new name")
    draft = request.file.with_name(f".{request.file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, _linked_folder(request.settings.folder) as links:
            writer = ArchiveWriter(file, request.passphrase, request.cost)
            summary = await _Backup(request, writer, links, now).write()
            writer.close()
            size = file.tell()
        os.link(draft, request.file)  # unlike a rename, it replaces nothing
    except FileExistsError as error:
        raise Conflict(f"{request.file} exists; give a new name") from error
    finally:
        draft.unlink(missing_ok=True)
    _flush_folder(request.file.absolute().parent)
    return BackupSummary(**{**summary, "size_bytes": size})


def master_file(settings: Settings) -> Path | None:
    """File with the master key; None: it comes from a variable or a command."""
    source = settings.master_source
    return source.file if source.is_ours else None


def masters_of(settings: Settings) -> tuple[MasterKey, ...]:
    """Master keys, never created here: a new one would open nothing."""
    file = master_file(settings)
    if file is not None and not file.exists():
        raise NotFound(
            f"there is no master key {file}; run this as the server runs, with its GPOOL_SERVER_ variables and --data"
        )
    return settings.master_source.load()


@contextmanager
def _linked_folder(root: Path) -> Iterator[Path]:
    """Folder for links to artifacts, on their file system; folders of killed backups are removed."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = root / f"backup-{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    held = _lock(folder)
    try:
        for other in root.glob("backup-*"):
            if other != folder and (free := _lock(other)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(free)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _lock(folder: Path) -> int | None:
    """Lock the folder until the descriptor is closed; None: another process has it, or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class _Backup:
    def __init__(
        self,
        request: BackupRequest,
        writer: ArchiveWriter,
        links: Path,
        now: Callable[[], Instant],
    ) -> None:
        self._settings, self._with_bucket = request.settings, request.with_bucket
        self._writer, self._links, self._now = writer, links, now
        self._folder = FolderStore(request.settings.folder)
        self._masters = masters_of(request.settings)
        self._rows: dict[str, int] = {}
        self._artifacts = 0
        self._in_bucket = 0
        self._bucket: Any = None

    async def write(self) -> dict[str, Any]:
        snapshot, at, lost = await self._complete_snapshot()
        try:
            file = master_file(self._settings)
            self._writer.add(
                BackupManifest(
                    VERSION,
                    await known_revision(snapshot),
                    snapshot.kind,
                    at,
                    [each.id.hex() for each in self._masters],
                    file is not None,
                    self._with_bucket,
                )
            )
            if file is not None:
                self._writer.add(ArchivedKey(MASTER_KEY, file.read_bytes()))
            await self._add_keys(snapshot)
            for table in await snapshot.tables():
                if table.name not in LEFT_OUT:
                    await self._add_table(snapshot, table)
            async for found in _artifacts(snapshot):
                await self._add_artifact(found, lost)
        finally:
            await snapshot.close()
        self._writer.add(ArchiveEnd(self._rows, self._artifacts, sorted(lost)))
        return {
            "at": at,
            "rows": sum(self._rows.values()),
            "tasks": self._rows.get("tasks", 0),
            "artifacts": self._artifacts,
            "in_bucket": self._in_bucket,
            "lost": tuple(sorted(lost)),
            "has_master_key": file is not None,
        }

    async def _complete_snapshot(self) -> tuple[StoreSnapshot, Instant, set[str]]:
        """Snapshot whose artifacts are linked. Files still missing from the last one were lost before the backup."""
        for number in range(1, SNAPSHOTS + 1):
            snapshot, at = await open_snapshot(self._settings.store_url), self._now()
            try:
                lost = {
                    found.sha256
                    async for found in _artifacts(snapshot)
                    if not found.in_bucket and not self._link(found.key)
                }
            except BaseException:
                await snapshot.close()
                raise
            if not lost or number == SNAPSHOTS:
                return snapshot, at, lost
            await snapshot.close()
        raise AssertionError("the last snapshot is returned")

    def _link(self, key: str) -> bool:
        place = self._links / key
        if place.exists():
            return True
        try:
            os.link(self._folder.path(key), place)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Invalid(
                f"{self._folder.path(key)} cannot be linked ({error.strerror}); "
                "run the backup as the server's user"
            ) from error
        return True

    async def _add_keys(self, snapshot: StoreSnapshot) -> None:
        """Key files; those that the store has are the pool's: replicas share them."""
        found = {
            name: path.read_bytes()
            for name in KEY_FILES
            if (path := self._settings.data / name).is_file()
        }
        if any(table.name == "server_secrets" for table in await snapshot.tables()):
            keys = await snapshot.read(sealed_fields.data_keys())
            wrapped = [WrappedKey(key.id, key.wrapped, key.created_at) for key in keys]
            for name, file in SHARED_SECRETS.items():
                sealed = await snapshot.read(sealed_fields.server_secret(name))
                if sealed is not None:
                    place = FieldLocation("server_secrets", name, "sealed")
                    secret = Envelope(self._masters, wrapped).open(place, sealed)
                    found[file] = secret.hex().encode() if file == ROOT_KEY else secret
        for name, data in found.items():
            self._writer.add(ArchivedKey(name, data))

    async def _add_table(self, snapshot: StoreSnapshot, table: TableColumns) -> None:
        self._writer.add(TableHead(table.name, list(table.columns)))
        count = 0
        async for page in snapshot.rows(table):
            count += len(page)
            batch: list[list[Any]] = []
            size = 0
            for row in page:
                batch.append(list(row))
                size += sum(len(value) for value in row if isinstance(value, str | bytes))
                if size >= BATCH_BYTES:
                    self._writer.add(TableRows(batch))
                    batch, size = [], 0
            if batch:
                self._writer.add(TableRows(batch))
        self._rows[table.name] = count

    async def _add_artifact(self, found: _Artifact, lost: set[str]) -> None:
        if found.in_bucket and not self._with_bucket:
            self._in_bucket += 1
        elif found.in_bucket:
            await self._add_object(found)
        elif found.sha256 not in lost:
            with (self._links / found.key).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._writer.add(ArtifactHead(found.key, size))
                while piece := file.read(READ_BYTES):
                    self._writer.add(FileData(piece))
            self._artifacts += 1

    async def _add_object(self, found: _Artifact) -> None:
        if self._bucket is None:
            self._bucket = _bucket(self._settings)
        size = await self._bucket.size_of(found.object)
        self._writer.add(ArtifactHead(found.sha256, size))
        async for piece in self._bucket.read(found.object, 0, size):
            self._writer.add(FileData(piece))
        self._artifacts += 1


def _bucket(settings: Settings) -> Any:
    if settings.bucket is None:
        raise Invalid("GPOOL_SERVER_ARTIFACTS is not set; artifacts of the bucket cannot be read")
    return import_module("gpool.server.blobs.s3").S3Blobs(settings.bucket)


async def _artifacts(snapshot: StoreSnapshot) -> AsyncIterator[_Artifact]:
    [columns] = [each.columns for each in await snapshot.tables() if each.name == "artifacts"]
    has_objects = "object" in columns  # since revision 0014
    wanted = TableColumns("artifacts", ("sha256", "object") if has_objects else ("sha256",))
    async for page in snapshot.rows(wanted):
        for row in page:
            sha256, *object_ = row
            yield _Artifact(sha256, *object_)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
