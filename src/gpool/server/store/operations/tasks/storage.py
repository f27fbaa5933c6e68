"""Bytes charged to users and teams: artifacts, rows with inline data, logs, and room reserved for uploads in progress.

Every row records what was charged for it (`stored_bytes`), so that deleting it returns exactly that. A sum over all rows
would cost a row each; the counter `storage` costs one row, or one per shard. One server writes to a store, so a room
that was read is still there when the same operation charges it. One file because all of it charges one counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from gpool.core.errors import StorageFull
from gpool.core.model import Instant
from gpool.server.store.generated_rows import UploadsRecord
from gpool.server.store.identity_values import Holder
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import columns, exists, of_ids, of_names, select, values

Account = tuple[Holder, int]

TASK_BYTES = 1024
"""Charge of a task, per node of a gang: its rows, their index entries, the kept answer, and a short end."""

END_BYTES = 384
"""Result, error text and output list that `TASK_BYTES` covers; a longer end is charged by its size."""

SPEC_BYTES = 512
ATTEMPT_BYTES = 512  # of an attempt that ended with a retry, with its phases
CHUNK_BYTES = 64  # of a chunk of output, besides its text
CHECKPOINT_BYTES = 256
SUMMARY_BYTES = 512
"""Charge of a shrunk task."""

ACCOUNTS = (("kind", "text"), ("id", "int"))
CHANGED = (*ACCOUNTS, ("change", "int"))
SHARD = "0 /*postgresql + pg_backend_pid() % 16*/"
"""One shard per database session, so that concurrent writers rarely wait for each other's row."""

UPLOAD = columns(UploadsRecord, UploadsRecord, "u")
THIS = "uploader = :uploader AND sha256 = :sha256 AND number = :number"
HOW_TO_FREE = (
    "delete ended tasks (`gpool delete TASK`) or uploads (`gpool artifacts`), "
    "or ask the operator for a larger storage quota"
)


class StorageLimits(NamedTuple):
    """Default storage quotas in bytes; None: no limit."""

    user: int | None = None
    team: int | None = None


NO_LIMITS = StorageLimits()


class AccountUsage(NamedTuple):
    """Quotas that an operator set for the account (None: the default), and the bytes charged to it."""

    kind: str
    id: int
    queued_tasks: int | None
    storage_bytes: int | None
    size_bytes: int | None

    @property
    def account(self) -> Account:
        return cast("Holder", self.kind), self.id


class _Used(NamedTuple):
    kind: str
    id: int
    size_bytes: int


DIRECT = -1


@dataclass(frozen=True, slots=True)
class UploadReservation:
    """Room for one upload of an account, kept between requests if `number` is 0 (in parts) or `DIRECT`."""

    uploader: str
    sha256: str
    number: int
    account: Account


def holder_of(user: int, team: int | None) -> Account:
    return ("user", user) if team is None else ("team", team)


def change(changes: Mapping[Account, int]) -> Operation[None]:
    rows = [(*account, size) for account, size in sorted(changes.items()) if size]
    if rows:
        yield Statement(
            f"INSERT INTO storage (kind, id, shard, size_bytes) SELECT c.kind, c.id, {SHARD}, c.change "  # noqa: S608
            "FROM {changes} AS c WHERE true ON CONFLICT (kind, id, shard) "
            "DO UPDATE SET size_bytes = storage.size_bytes + excluded.size_bytes",
            {},
            {"changes": Relation(CHANGED, rows)},
        )


def rooms(accounts: Collection[Account], limits: StorageLimits) -> Operation[dict[Account, int]]:
    return room_of((yield from usage_of(accounts)), limits)


def usage_of(accounts: Collection[Account]) -> Operation[Sequence[AccountUsage]]:
    """One row for each account."""
    if not accounts:
        return ()
    return (
        yield from select(
            AccountUsage,
            "SELECT a.kind, a.id, q.queued_tasks, q.storage_bytes, (SELECT SUM(s.size_bytes) FROM storage s "
            "WHERE s.kind = a.kind AND s.id = a.id) FROM {accounts} AS a "
            "LEFT JOIN quotas q ON q.kind = a.kind AND q.id = a.id",
            {},
            {"accounts": Relation(ACCOUNTS, sorted(accounts))},
        )
    )


def room_of(rows: Iterable[AccountUsage], limits: StorageLimits) -> dict[Account, int]:
    """Bytes that each account may still store, below 0 if it is over; accounts without a limit are absent."""
    found: dict[Account, int] = {}
    for row in rows:
        usual = limits.user if row.kind == "user" else limits.team
        limit = row.storage_bytes if row.storage_bytes is not None else usual
        if limit is not None:
            found[row.account] = limit - int(row.size_bytes or 0)
    return found


def used(account: Account) -> Operation[int]:
    rows = yield from select(
        _Used,
        "SELECT kind, id, SUM(size_bytes) FROM storage WHERE kind = :kind AND id = :id GROUP BY kind, id",
        {"kind": account[0], "id": account[1]},
    )
    return int(rows[0].size_bytes) if rows else 0


def storage_full(account: Account, what: str, size: int, room: int) -> StorageFull:
    whose = "your account" if account[0] == "user" else "your team"
    return StorageFull(
        f"{what} needs {size} bytes and {whose} may store only {max(0, room)} more; {HOW_TO_FREE}"
    )


class ArtifactUse(NamedTuple):
    kind: str  # of a reference; `unfinished`: uploads in progress
    number: int
    size_bytes: int


@operation
def artifact_uses(account: Account) -> Operation[list[ArtifactUse]]:
    """Number and bytes of the artifacts that the account is charged for, by use, and of uploads in progress."""
    whose = {"kind": account[0], "id": account[1]}
    found = yield from select(
        ArtifactUse,
        "SELECT used.kind, COUNT(*), SUM(used.size_bytes) FROM (SELECT a.size_bytes, "  # noqa: S608
        f"COALESCE((SELECT MIN(r.kind) FROM artifact_refs r WHERE r.sha256 = a.sha256 AND {own_references(account)}), 'upload') AS kind "
        "FROM stored s JOIN artifacts a ON a.sha256 = s.sha256 WHERE s.kind = :kind AND s.id = :id) AS used "
        "GROUP BY used.kind",
        whose,
    )
    unfinished = yield from select(
        ArtifactUse,
        "SELECT 'unfinished', COUNT(*), COALESCE(SUM(size_bytes), 0) FROM uploads WHERE kind = :kind AND account = :id",
        whose,
    )
    uses = (*found, *(row for row in unfinished if row.number))
    return [ArtifactUse(row.kind, int(row.number), int(row.size_bytes)) for row in uses]


def own_references(account: Account) -> str:
    return "r.team_id = :id" if account[0] == "team" else "r.team_id IS NULL AND r.user_id = :id"


# ---- uploads in progress


@operation
def is_stored(account: Account, sha256: str) -> Operation[bool]:
    """Return whether the account is charged for this artifact already."""
    return (
        yield from exists(
            "SELECT 1 FROM stored WHERE kind = :kind AND id = :id AND sha256 = :sha256",
            {"kind": account[0], "id": account[1], "sha256": sha256},
        )
    )


@operation
def reserve(
    upload: UploadReservation, size: int, limits: StorageLimits, at: Instant
) -> Operation[StorageFull | None]:
    """Charge `size` bytes in all for an upload before its bytes are stored; return the error if they do not fit.

    A reservation never shrinks: an earlier request may have stored as many bytes as it reserved.
    """
    before = yield from _reservation(upload)
    charged = 0 if before is None else before.size_bytes
    size = max(size, charged)
    account = upload.account if before is None else _account(before)
    room = (yield from rooms([account], limits)).get(account)
    if room is not None and size - charged > max(0, room):
        return storage_full(account, "this artifact", size, room + charged)
    yield Statement(
        "INSERT INTO uploads (uploader, sha256, number, kind, account, size_bytes, at) "
        "VALUES (:uploader, :sha256, :number, :kind, :account, :size, :at) "
        "ON CONFLICT (uploader, sha256, number) DO UPDATE SET size_bytes = excluded.size_bytes, at = excluded.at",
        _key(upload) | {"kind": account[0], "account": account[1], "size": size, "at": at},
    )
    yield from change({account: size - charged})
    return None


@operation
def release_upload(upload: UploadReservation) -> Operation[None]:
    yield from take_reservation(upload)


@operation
def direct_upload(upload: UploadReservation) -> Operation[UploadsRecord | None]:
    rows = yield from select(
        UploadsRecord,
        f"SELECT {UPLOAD} FROM uploads u WHERE {THIS}",  # noqa: S608
        _key(upload),
    )
    return rows[0] if rows else None


@operation
def open_direct_upload(
    upload: UploadReservation, object_: str, upload_id: str
) -> Operation[UploadsRecord | None]:
    """Record the multipart upload of a reservation; the first one recorded stays. None: the reservation is gone."""
    yield Statement(
        f"UPDATE uploads SET object = :object, upload_id = :upload_id WHERE {THIS} AND upload_id = ''",  # noqa: S608
        _key(upload) | {"object": object_, "upload_id": upload_id},
    )
    return (yield from _reservation(upload))


def holds_object(upload: UploadReservation, object_: str) -> Operation[bool]:
    found = yield from _reservation(upload)
    return found is not None and found.object == object_


def take_reservation(upload: UploadReservation) -> Operation[int]:
    """Delete the reservation; return the bytes it held for the upload's account."""
    before = yield from _reservation(upload)
    if before is None:
        return 0
    yield Statement(f"DELETE FROM uploads WHERE {THIS}", _key(upload))  # noqa: S608
    yield from change({_account(before): -before.size_bytes})
    return before.size_bytes if _account(before) == upload.account else 0


def _reservation(upload: UploadReservation) -> Operation[UploadsRecord | None]:
    rows = yield from select(
        UploadsRecord,
        f"SELECT {UPLOAD} FROM uploads u WHERE {THIS} /*postgresql FOR UPDATE*/",  # noqa: S608
        _key(upload),
    )
    return rows[0] if rows else None


def _key(upload: UploadReservation) -> dict[str, int | str]:
    return {"uploader": upload.uploader, "sha256": upload.sha256, "number": upload.number}


def _account(row: UploadsRecord) -> Account:
    return cast("Holder", row.kind), row.account


class UnfinishedUpload(NamedTuple):
    """The caller discards its bytes: parts on disk, or a multipart upload of the object store."""

    uploader: str
    sha256: str
    object: str
    upload_id: str


@operation
def forget_uploads(before: Instant, limit: int) -> Operation[list[UnfinishedUpload]]:
    """Release the room of uploads in parts that nobody has continued since then."""
    return (yield from _forget("at < :before ORDER BY at LIMIT :limit", before=before, limit=limit))


@operation
def forget_upload(upload: UploadReservation) -> Operation[list[UnfinishedUpload]]:
    return (yield from _forget(THIS, **_key(upload)))


@operation
def forget_interrupted() -> Operation[list[UnfinishedUpload]]:
    """Release the room of requests that a stopped server did not finish."""
    return (yield from _forget("number > 0"))


@operation
def forget_uploads_of(uploader: str) -> Operation[list[UnfinishedUpload]]:
    return (yield from _forget("uploader = :uploader", uploader=uploader))


class KnownObjects(NamedTuple):
    """Keys and multipart uploads that a row names."""

    objects: frozenset[str]
    upload_ids: frozenset[str]


class _OpenObject(NamedTuple):
    object: str
    upload_id: str


@operation
def known_objects(sha256s: Iterable[str]) -> Operation[KnownObjects]:
    """Objects of these artifacts, and of all uploads in progress."""
    stored = yield from values(
        str,
        "SELECT CASE WHEN a.object = '' THEN a.sha256 ELSE a.object END FROM {wanted} AS w "
        "JOIN artifacts a ON a.sha256 = w.name",
        {},
        {"wanted": of_names(sha256s)},
    )
    open_ = yield from select(
        _OpenObject, "SELECT object, upload_id FROM uploads WHERE upload_id <> ''", {}
    )
    return KnownObjects(
        frozenset(stored).union(row.object for row in open_),
        frozenset(row.upload_id for row in open_),
    )


class _HeldTask(NamedTuple):
    id: int
    node_id: int | None  # None: a gang


def node_uploader(node: int, task: int) -> str:
    return f"n{node}t{task}"


@operation
def forget_uploads_of_ended_leases() -> Operation[list[UnfinishedUpload]]:
    """Release the room of nodes' uploads in parts whose lease is over: a node must not keep its consumer's quota."""
    rows = yield from select(
        UploadsRecord,
        f"SELECT {UPLOAD} FROM uploads u WHERE u.number <= 0 AND u.uploader LIKE 'n%'",  # noqa: S608
        {},
    )
    if not rows:
        return []
    tasks = {row: int(row.uploader.partition("t")[2] or 0) for row in rows}
    held = yield from select(
        _HeldTask,
        "SELECT t.id, t.node_id FROM {wanted} AS w JOIN tasks t ON t.id = w.id WHERE t.holding = 1",
        {},
        {"wanted": of_ids(tasks.values())},
    )
    nodes = {task.id: task.node_id for task in held}

    def is_over(row: UploadsRecord) -> bool:
        task = tasks[row]
        node = nodes.get(task, 0)
        return node is not None and row.uploader != node_uploader(node, task)

    over = [row for row in rows if is_over(row)]
    yield from _delete_uploads(over)
    return [_unfinished(row) for row in over]


def _forget(where: str, **parameters: int | str) -> Operation[list[UnfinishedUpload]]:
    rows = yield from select(
        UploadsRecord,
        f"SELECT {UPLOAD} FROM uploads u WHERE {where} /*postgresql FOR UPDATE*/",  # noqa: S608
        parameters,
    )
    yield from _delete_uploads(rows)
    return [_unfinished(row) for row in rows]


def _unfinished(row: UploadsRecord) -> UnfinishedUpload:
    return UnfinishedUpload(row.uploader, row.sha256, row.object, row.upload_id)


def _delete_uploads(rows: Sequence[UploadsRecord]) -> Operation[None]:
    if rows:
        names = (("uploader", "text"), ("sha256", "text"), ("number", "int"))
        yield Statement(
            "DELETE FROM uploads WHERE (uploader, sha256, number) IN "
            "(SELECT uploader, sha256, number FROM {gone} AS g)",
            {},
            {"gone": Relation(names, [(row.uploader, row.sha256, row.number) for row in rows])},
        )
        yield from change(summed((_account(row), -row.size_bytes) for row in rows))


def summed(pairs: Iterable[tuple[Account, int]]) -> dict[Account, int]:
    total: Counter[Account] = Counter()
    for account, size in pairs:
        total[account] += size
    return dict(total)
