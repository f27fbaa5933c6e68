"""Restore of a backup into an empty data directory and database. The whole file is verified before anything changes.

The database is filled aside (SQLite: a second file; PostgreSQL: one transaction) and fenced
(`store.operations.recovery`); putting it in place is the last step. A restore that was interrupted can be repeated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.model import SECOND, Instant
from gpool.server.app import private_directory
from gpool.server.blobs.stores import FolderStore
from gpool.server.identity.audit import OK, AuditEntry, facts
from gpool.server.recovery.archive import (
    ArchivedKey,
    ArchiveEnd,
    ArchiveReader,
    ArtifactHead,
    BackupManifest,
    FileData,
    Record,
    TableHead,
    TableRows,
)
from gpool.server.recovery.backup import KEY_FILES, MASTER_KEY, master_file
from gpool.server.recovery.snapshots import StoreTarget, open_target
from gpool.server.settings import Settings
from gpool.server.store.drivers.opening import lock_for_serving
from gpool.server.store.drivers.shared import TableColumns
from gpool.server.store.migrations import newest_migration
from gpool.server.store.operations.recovery import RestoredStore, fence_restored
from gpool.transfer.keys import write_private

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_KEY = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{16})?")
"""Names become SQL and paths: a file with a known passphrase is not yet one of ours."""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """`force`: replace a database, key files and artifacts that are there; replaced files are moved aside."""

    settings: Settings
    file: Path
    passphrase: str = field(repr=False)
    force: bool = False


@dataclass(frozen=True, slots=True)
class VerifiedArchive:
    manifest: BackupManifest
    end: ArchiveEnd


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    manifest: BackupManifest
    rows: int
    tasks: int
    artifacts: int
    lost: tuple[str, ...]
    fenced: RestoredStore
    replaced: Path | None  # folder with the files that were there


def opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from error


def verified(file: BinaryIO, passphrase: str) -> VerifiedArchive:
    """Read and authenticate the whole archive; `Invalid` if it is damaged or newer than this version of gpool."""
    manifest: BackupManifest | None = None
    end: ArchiveEnd | None = None
    counted: dict[str, int] = {}
    table, artifacts, missing = "", 0, 0
    for record in ArchiveReader(file, passphrase).records():
        if end is not None or (manifest is None) != isinstance(record, BackupManifest):
            raise _contradictory("its records are out of order")
        match record:
            case BackupManifest():
                manifest = _readable(record)
            case ArchivedKey():
                if record.name not in (*KEY_FILES, MASTER_KEY):
                    raise _contradictory(f"it has an unknown key file {record.name[:80]!r}")
            case TableHead():
                if not all(_NAME.fullmatch(name) for name in (record.name, *record.columns)):
                    raise _contradictory(f"{record.name[:80]!r} is no table of gpool")
                table = record.name
                counted[table] = 0
            case TableRows():
                counted[table] = counted.get(table, 0) + len(record.rows)
            case ArtifactHead():
                if not _KEY.fullmatch(record.key):
                    raise _contradictory(f"{record.key[:80]!r} is no artifact")
                missing += record.size
                artifacts += 1
            case FileData():
                missing -= len(record.data)
            case ArchiveEnd():
                end = record
    if manifest is None or end is None:
        raise _contradictory("its end is missing")
    if counted != end.rows or artifacts != end.artifacts or missing:
        raise _contradictory("its counts differ from its contents")
    return VerifiedArchive(manifest, end)


def _readable(manifest: BackupManifest) -> BackupManifest:
    if manifest.revision > newest_migration():
        raise Invalid(
            f"the backup has the schema {manifest.revision} of gpool {manifest.version}, and this version knows "
            f"{newest_migration()}; restore it with gpool {manifest.version} or newer"
        )
    return manifest


def _contradictory(why: str) -> Invalid:
    return Invalid(f"the backup cannot be used: {why}; use another copy of the file")


async def restore(request: RestoreRequest, now: Callable[[], Instant]) -> RestoreSummary:
    """Restore the pool; no server may run on the target.

    `Conflict` if the target is not empty and not `force`; `Invalid` if the archive is damaged or its master key is
    neither inside nor given. Nothing is changed then.
    """
    settings = request.settings
    with opened(request.file) as file:
        archive = verified(file, request.passphrase)
        _check_master_keys(settings, archive.manifest)
        _check_files(settings, archive.manifest, force=request.force)
        private_directory(settings.data)
        async with lock_for_serving(settings.store_url):
            target = await open_target(settings.store_url)
            try:
                term = await target.check(force=request.force)
                await target.begin(archive.manifest.revision)
                reader = ArchiveReader(file, request.passphrase)
                keys = await _load(reader.records(), target, settings.folder)
                manifest, at = archive.manifest, now()
                entry = AuditEntry(0, at, "", "pool.restore", "", OK, "", _facts(archive))
                fenced = await target.finish(
                    fence_restored(term, at, entry, forget_objects=manifest.has_bucket)
                )
                replaced = _move_aside(settings, manifest, at)
                _write_keys(settings, keys)
                await target.commit()
            finally:
                await target.close()
    return RestoreSummary(
        manifest,
        sum(archive.end.rows.values()),
        archive.end.rows.get("tasks", 0),
        archive.end.artifacts,
        tuple(archive.end.lost),
        fenced,
        replaced,
    )


def _facts(archive: VerifiedArchive) -> tuple[tuple[str, str], ...]:
    manifest, tasks = archive.manifest, archive.end.rows.get("tasks", 0)
    return facts(
        {
            "backup_at": timestamp(manifest.at),
            "from": manifest.version,
            "tasks": str(tasks),
        }
    )


def timestamp(at: int) -> str:
    return datetime.fromtimestamp(at // SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- checks before the first change


def _check_master_keys(settings: Settings, manifest: BackupManifest) -> None:
    file = master_file(settings)
    if manifest.has_master_key and file is not None:
        return
    if manifest.has_master_key:
        wanted = set(manifest.master_keys)
        if not wanted <= {each.id.hex() for each in settings.master_source.load()}:
            raise Invalid(
                f"the backup's secrets are encrypted with the master key {', '.join(sorted(wanted))}, and "
                "GPOOL_SERVER_MASTER_KEY or its command gives another one; unset them, and the backup's own is used"
            )
        return
    given = set()
    if file is None or file.exists():
        given = {each.id.hex() for each in settings.master_source.load()}
    lacking = sorted(set(manifest.master_keys) - given)
    if lacking:
        raise Invalid(
            f"the backup has no master key, since its server got it from outside; give the key {', '.join(lacking)} "
            "with GPOOL_SERVER_MASTER_KEY or GPOOL_SERVER_MASTER_KEY_COMMAND"
        )


def _check_files(settings: Settings, manifest: BackupManifest, *, force: bool) -> None:
    there = _present(settings, manifest)
    if there and not force:
        raise Conflict(
            f"{there[0]} exists; restore into an empty directory, or move such files aside with --force"
        )


def _present(settings: Settings, manifest: BackupManifest) -> list[Path]:
    """Files that a restore would replace, besides artifacts."""
    names = [settings.data / name for name in KEY_FILES]
    if manifest.has_master_key and settings.master_source.is_ours:
        names.append(settings.master_source.file)
    database = settings.store_url.removeprefix("sqlite:///")
    if not settings.is_shared:
        names += [Path(f"{database}{suffix}") for suffix in ("", "-wal", "-shm")]
    return [path for path in names if path.exists()]


# ---- loading


async def _load(records: Iterator[Record], target: StoreTarget, folder: Path) -> list[ArchivedKey]:
    """Fill the database and the artifact folder; return the key files."""
    keys: list[ArchivedKey] = []
    table = TableColumns("", ())
    artifacts = _ArtifactFiles(folder)
    try:
        for record in records:
            match record:
                case ArchivedKey():
                    keys.append(record)
                case TableHead():
                    table = TableColumns(record.name, tuple(record.columns))
                case TableRows():
                    await target.insert(table, record.rows)
                case ArtifactHead():
                    artifacts.begin(record)
                case FileData():
                    artifacts.add(record.data)
                case BackupManifest() | ArchiveEnd():
                    pass
    finally:
        artifacts.close()
    return keys


class _ArtifactFiles:
    """Writes artifacts under their names; one that is there is replaced whole."""

    def __init__(self, folder: Path) -> None:
        self._store = FolderStore(folder)
        self._draft = folder / "incoming" / "restored.tmp"
        self._draft.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file: BinaryIO | None = None
        self._head = ArtifactHead("", 0)
        self._left = 0

    def begin(self, head: ArtifactHead) -> None:
        self._draft.unlink(missing_ok=True)
        descriptor = os.open(
            self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        self._file = os.fdopen(descriptor, "wb")
        self._head, self._left = head, head.size
        self._publish_if_whole()

    def add(self, data: bytes) -> None:
        if self._file is None:
            raise _contradictory("it has bytes of no artifact")
        self._file.write(data)
        self._left -= len(data)
        self._publish_if_whole()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._draft.unlink(missing_ok=True)

    def _publish_if_whole(self) -> None:
        if self._left:
            return
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._store.publish(self._draft, self._head.key)


# ---- key files


def _move_aside(settings: Settings, manifest: BackupManifest, at: Instant) -> Path | None:
    """Move files that the restore replaces into a folder of the data directory; None if there is none."""
    there = _present(settings, manifest)
    if not there:
        return None
    aside = settings.data / f"replaced-{timestamp(at).replace(':', '')}"
    aside.mkdir(mode=0o700, exist_ok=True)
    for path in there:
        path.rename(aside / path.name)
    return aside


def _write_keys(settings: Settings, keys: list[ArchivedKey]) -> None:
    for key in keys:
        path = settings.data / key.name
        if key.name == MASTER_KEY:
            if not settings.master_source.is_ours:
                continue  # the same keys come from outside
            path = settings.master_source.file
        write_private(path, key.data, replace=True)
