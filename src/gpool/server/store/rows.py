"""How values lie in rows, and back. Texts that repeat (specs, offers, allocations) are decoded once and remembered."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import msgspec

from gpool.core.errors import Invalid
from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
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
from gpool.server.store.protocol import Relation, Row
from gpool.server.store.values import HeldLease, NodeRow

STATUS = {status.value: status for status in TaskStatus}
REASON = {reason.value: reason for reason in EndReason}

REMEMBERED_LENGTH = 8 * 1024
"""Longer specs are decoded each time: thousands of them, each with thousands of inputs, would fill the memory."""

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
            "the task holds half a character (a lone surrogate); send valid text"
        ) from exc


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def spec_from(text: str) -> TaskSpec:
    return _remembered_spec(text) if len(text) <= REMEMBERED_LENGTH else _spec(text)


@lru_cache(maxsize=4096)
def _remembered_spec(text: str) -> TaskSpec:
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
    """A checkpoint's files, in one order whatever order they were told in."""
    return _encode(sorted(files, key=lambda file: file.path)).decode()


def manifest_from(text: str) -> tuple[InputFile, ...]:
    """As the next attempt gets them: what one left is what the other finds."""
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
    """PostgreSQL's texts hold no NUL."""
    return text.replace("\x00", "\ufffd")


def of_ids(numbers: Any) -> Relation:
    """A relation of one column, `id`; sorted, so that locks are taken in one order."""
    return Relation((("id", "int"),), [(number,) for number in sorted(set(numbers))])


def of_names(texts: Any) -> Relation:
    """A relation of one column, `name`."""
    return Relation((("name", "text"),), [(text,) for text in sorted(set(texts))])


TASK_COLUMNS = (
    "t.id, t.batch_id, t.position, t.spec_id, t.user_id, t.status, t.epoch, t.created_at, t.node_id, "
    "t.allocation_number, t.allocation, t.holding, t.leased_at, t.started_at, t.finished_at, t.reason, "
    "t.exit_code, t.error_text, t.tries, t.losses, t.queued_at, t.team_id"
)
TASK_WIDTH = 22


def task_row(row: Row) -> TaskRow:
    """From `TASK_COLUMNS`; what follows them in the row is not looked at."""
    reason = row[15]
    return TaskRow(
        id=TaskId(row[0]),
        batch=BatchId(row[1]),
        position=row[2],
        spec=SpecId(row[3]),
        user=UserId(row[4]),
        status=STATUS[row[5]],
        epoch=row[6],
        created_at=row[7],
        node=row[8],
        allocation=None if row[10] is None else allocation_from(row[9], row[10]),
        holding=bool(row[11]),
        leased_at=row[12],
        started_at=row[13],
        finished_at=row[14],
        reason=None if reason is None else REASON[reason],
        exit_code=row[16],
        error_text=row[17],
        tries=row[18],
        losses=row[19],
        queued_at=row[20],
        team=row[21],
    )


HELD_COLUMNS = "t.id, t.epoch, t.user_id, t.status, t.spec_id, t.allocation_number, t.allocation"


def held_lease(row: Row, payload: bytes | None = None, payload_sha256: str = "") -> HeldLease:
    """From `HELD_COLUMNS`."""
    return HeldLease(
        task=TaskId(row[0]),
        epoch=row[1],
        user=UserId(row[2]),
        status=STATUS[row[3]],
        spec=SpecId(row[4]),
        allocation=allocation_from(row[5], row[6]),
        payload=payload or b"",
        payload_sha256=payload_sha256,
    )


NODE_COLUMNS = "n.id, n.owner_id, n.name, n.offer, n.availability, n.last_beat_at, n.created_at"


def node_row(
    row: Row,
    withheld: frozenset[int] = frozenset(),
    flagged: frozenset[int] = frozenset(),
    audience: Audience | None = None,
    problems: tuple[str, ...] = (),
) -> NodeRow:
    """From `NODE_COLUMNS`. Whether it is connected, only the server knows: here it is not."""
    node = Node(
        id=NodeId(row[0]),
        owner=UserId(row[1]),
        name=row[2],
        offer=offer_from(row[3]),
        availability=Availability(row[4]),
        connected=False,
        gpus_withheld=withheld,
        gpus_flagged=flagged,
        audience=audience,
    )
    return NodeRow(node, row[5], Instant(row[6]), problems)
