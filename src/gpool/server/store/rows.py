"""Encoding of values in columns, and typed results of statements. Repeating texts are decoded once and cached.

A row type is a NamedTuple: generated from the schema (`generated_rows`), or beside its query.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from gpool.core.errors import InternalFault, Invalid
from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import (
    Allocation,
    Audience,
    Availability,
    EndReason,
    InputFile,
    Instant,
    Node,
    Offer,
    OutputFile,
    Slice,
    TaskRow,
    TaskSpec,
    TaskStatus,
)
from gpool.server.store.generated_rows import NodesRecord, TasksRecord
from gpool.server.store.protocol import Operation, Parameters, Relation, Relations, Statement
from gpool.server.store.values import HeldLease, NodeRow

R = TypeVar("R", bound=NamedTuple)
S = TypeVar("S", bound=NamedTuple)
V = TypeVar("V")
NONE: Mapping[str, Any] = {}

_new = cast("Any", tuple.__new__)
"""Faster than `_make`, which checks the width of every row: here the first row's is checked."""


def select(
    row: type[R], sql: str, parameters: Parameters = NONE, relations: Relations = NONE
) -> Operation[list[R]]:
    rows = yield Statement(sql, parameters, relations)
    assert isinstance(rows, list)
    if rows and len(rows[0]) != len(row._fields):
        raise InternalFault(f"a statement returned {len(rows[0])} columns for {row.__name__}")
    return list(map(partial(_new, row), rows))


def select_pairs(
    first: type[R],
    second: type[S],
    sql: str,
    parameters: Parameters = NONE,
    relations: Relations = NONE,
) -> Operation[list[tuple[R, S]]]:
    rows = yield Statement(sql, parameters, relations)
    assert isinstance(rows, list)
    width = len(first._fields)
    if rows and len(rows[0]) != width + len(second._fields):
        names = f"{first.__name__} and {second.__name__}"
        raise InternalFault(f"a statement returned {len(rows[0])} columns for {names}")
    return [(_new(first, row[:width]), _new(second, row[width:])) for row in rows]


def values(
    kind: type[V],  # noqa: ARG001 - names the result's type
    sql: str,
    parameters: Parameters = NONE,
    relations: Relations = NONE,
) -> Operation[list[V]]:
    rows = yield Statement(sql, parameters, relations)
    assert isinstance(rows, list)
    return [value for (value,) in rows]


def exists(sql: str, parameters: Parameters = NONE, relations: Relations = NONE) -> Operation[bool]:
    return bool((yield Statement(sql, parameters, relations)))


def columns(row: type[NamedTuple], record: type[NamedTuple], alias: str) -> str:
    """Columns of one table as SQL, for a row type with some or all of them.

    Raises at import where a field is not a column of that type, so a row type cannot differ from the schema. A field may
    leave out `| None` where the query selects no NULL.
    """
    for name in row._fields:
        wanted, there = _type(row, name), _type(record, name)
        if wanted not in (there, there.removesuffix(" | None")):
            raise InternalFault(f"{row.__name__}.{name} is {wanted}; {record.__name__} has {there}")
    return ", ".join(f"{alias}.{name}" for name in row._fields)


@lru_cache(maxsize=64)
def relation_columns(row: type[NamedTuple]) -> tuple[tuple[str, str], ...]:
    kinds = {"str": "text", "bytes": "blob"}
    return tuple(
        (name, kinds.get(_type(row, name).removesuffix(" | None"), "int")) for name in row._fields
    )


@lru_cache(maxsize=64)
def _insert_texts(table: str, row: type[NamedTuple]) -> tuple[str, str]:
    names = ", ".join(row._fields)
    begins = f"INSERT INTO {table} ({names})"
    picked = ", ".join(f"r.{name}" for name in row._fields)
    places = ", ".join("?" * len(row._fields))
    picks = f"{begins} SELECT {picked} FROM {{rows}} AS r WHERE TRUE"  # noqa: S608 - names of code
    return picks, f"{begins} VALUES ({places})"


def insert(
    table: str, row: type[NamedTuple], rows: Sequence[tuple[Any, ...]], conflict: str = ""
) -> Statement:
    """Insert rows whose fields are the columns of the table. `conflict`: an ON CONFLICT clause."""
    sql, plain = _insert_texts(table, row)
    relations = {"rows": Relation(relation_columns(row), rows)}
    return Statement(f"{sql} {conflict}", {}, relations, f"{plain} {conflict}")


def _type(row: type[NamedTuple], name: str) -> str:
    found = row.__annotations__.get(name, "no such column")
    return str(getattr(found, "__forward_arg__", found))


STATUS = {status.value: status for status in TaskStatus}
REASON = {reason.value: reason for reason in EndReason}

CACHED_LENGTH = 8 * 1024
"""Longer specs are not cached: thousands of them, each with thousands of inputs, would fill the memory."""

_encode = msgspec.json.Encoder(order="deterministic").encode
_spec = msgspec.json.Decoder(TaskSpec).decode
_offer = msgspec.json.Decoder(Offer).decode
_outputs = msgspec.json.Decoder(tuple[OutputFile, ...]).decode
_manifest = msgspec.json.Decoder(tuple[InputFile, ...]).decode


def spec_text(spec: TaskSpec) -> str:
    try:
        return _encode(spec).decode()
    except UnicodeEncodeError as exc:
        raise Invalid(
            "the task contains half a character (a lone surrogate); send valid text"
        ) from exc


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def spec_from(text: str) -> TaskSpec:
    return _cached_spec(text) if len(text) <= CACHED_LENGTH else _spec(text)


@lru_cache(maxsize=4096)
def _cached_spec(text: str) -> TaskSpec:
    return _spec(text)


def offer_text(offer: Offer) -> str:
    return _encode(offer).decode()


@lru_cache(maxsize=1024)
def offer_from(text: str) -> Offer:
    return _offer(text)


def outputs_text(outputs: tuple[OutputFile, ...]) -> str | None:
    return _encode(outputs).decode() if outputs else None


def outputs_from(text: str | None) -> tuple[OutputFile, ...]:
    return _outputs(text) if text else ()


def manifest_text(files: tuple[OutputFile, ...]) -> str:
    return _encode(sorted(files, key=lambda file: file.path)).decode()


def manifest_from(text: str) -> tuple[InputFile, ...]:
    return _manifest(text)


@lru_cache(maxsize=4096)
def allocation_text(allocation: Allocation) -> str:
    slices = [
        (s.gpu_index, s.memory_bytes, s.share_milli, *((s.profile, s.start) if s.profile else ()))
        for s in allocation.slices
    ]
    disk = (allocation.disk_bytes,) if allocation.disk_bytes else ()
    return _encode((allocation.cpu_milli, allocation.memory_bytes, slices, *disk)).decode()


@lru_cache(maxsize=4096)
def allocation_from(number: int, text: str) -> Allocation:
    cpu, memory, slices, *disk = msgspec.json.decode(text)
    return Allocation(number, cpu, memory, tuple(Slice(*part) for part in slices), *disk)


def storable(text: str) -> str:
    """Replace NUL, which PostgreSQL cannot store in a text."""
    return text.replace("\x00", "\ufffd")


def of_ids(numbers: Iterable[int]) -> Relation:
    """Relation of one column, `id`, sorted so that all operations lock rows in one order."""
    return Relation((("id", "int"),), [(number,) for number in sorted(set(numbers))])


def of_names(texts: Iterable[str]) -> Relation:
    return Relation((("name", "text"),), [(text,) for text in sorted(set(texts))])


# ---- tasks


def _task_columns(*without: str) -> str:
    names = TasksRecord._fields
    return ", ".join("NULL" if name in without else f"t.{name}" for name in names)


TASK_COLUMNS = _task_columns("payload")
"""All columns of a task but its payload, which may be large."""
TASK_COLUMNS_WITHOUT_VALUE = _task_columns("payload", "value")


def task_row(record: TasksRecord) -> TaskRow:
    return TaskRow(
        id=record.id,
        batch=record.batch_id,
        position=record.position,
        spec=record.spec_id,
        user=record.user_id,
        status=STATUS[record.status],
        epoch=record.epoch,
        created_at=record.created_at,
        node=record.node_id,
        allocation=None
        if record.allocation_number is None or record.allocation is None
        else allocation_from(record.allocation_number, record.allocation),
        holding=bool(record.holding),
        leased_at=record.leased_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        reason=None if record.reason is None else REASON[record.reason],
        exit_code=record.exit_code,
        error_text=record.error_text,
        tries=record.tries,
        losses=record.losses,
        queued_at=record.queued_at,
        team=record.team_id,
        parent=record.parent_id,
    )


class OpenLease(NamedTuple):
    """Columns of the task; of a gang's member, the allocation is the member's."""

    id: TaskId
    epoch: int
    user_id: UserId
    status: str
    spec_id: SpecId
    allocation_number: int
    allocation: str


OPEN_LEASE = columns(OpenLease, TasksRecord, "t")


def held_lease(row: OpenLease, payload: bytes | None = None, payload_sha256: str = "") -> HeldLease:
    return HeldLease(
        task=row.id,
        epoch=row.epoch,
        user=row.user_id,
        status=STATUS[row.status],
        spec=row.spec_id,
        allocation=allocation_from(row.allocation_number, row.allocation),
        payload=payload or b"",
        payload_sha256=payload_sha256,
    )


# ---- nodes


class StoredNode(NamedTuple):
    id: NodeId
    owner_id: UserId
    name: str
    offer: str
    availability: str
    last_beat_at: Instant | None
    created_at: Instant


STORED_NODE = columns(StoredNode, NodesRecord, "n")


def node_row(
    row: StoredNode,
    withheld: frozenset[int] = frozenset(),
    flagged: frozenset[int] = frozenset(),
    audience: Audience | None = None,
    free_for: Audience | None = None,
    problems: tuple[str, ...] = (),
    *,
    owner_teams: frozenset[int] = frozenset(),
    unproven: frozenset[int] = frozenset(),
) -> NodeRow:
    """Decode a node; `connected` is False, because the store does not know it."""
    node = Node(
        id=row.id,
        owner=row.owner_id,
        name=row.name,
        offer=offer_from(row.offer),
        availability=Availability(row.availability),
        connected=False,
        gpus_withheld=withheld,
        gpus_flagged=flagged,
        gpus_unproven=unproven,
        audience=audience,
        free_for=free_for,
        owner_teams=owner_teams,
    )
    return NodeRow(node, row.last_beat_at, row.created_at, problems)
