"""REST documents of tasks, batches, results and events, built from stored values. Pure functions.

One file because all of them are views of one task's rows and share its small parts (outputs, slices, times).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

import msgspec

from gpool.core.ids import ALPHABET, UserId, encode
from gpool.core.model import (
    AttemptRow,
    Instant,
    NodeId,
    OutputFile,
    Phase,
    Slice,
    TaskRow,
    TaskSpec,
    TaskStatus,
)
from gpool.core.specs import fields, gpu, owners
from gpool.core.specs.progress import WHOLE, from_stored
from gpool.core.trust.rounds import SPOT
from gpool.server.store.values import (
    PREEMPTING,
    RECLAIMING,
    UNFUNDED,
    Batch,
    BatchResult,
    MemberView,
    SavedCheckpoint,
    TaskStory,
    TaskView,
)
from gpool.wire.documents import (
    BatchDocument,
    CheckpointDocument,
    EventDocument,
    GpuSliceDocument,
    MemberDocument,
    OutputDocument,
    ProgressDocument,
    ReportedProgress,
    TaskDocument,
    VerificationDocument,
    instant_to_datetime,
)


class ResultLine(msgspec.Struct, frozen=True):
    """`wire.documents.ResultDocument` without pydantic, for thousands of results a second. Bytes as base64."""

    id: str
    position: int
    sequence: int
    status: TaskStatus
    reason: str | None = None
    exit_code: int | None = None
    value: bytes = b""
    value_sha256: str = ""
    error_text: str = ""
    outputs: tuple[OutputFile, ...] = ()
    node: str | None = None
    node_name: str | None = None
    own_node: bool = False
    on: str | None = None
    printed: bool = False


_encoder = msgspec.json.Encoder()
_LAST_TWO = [a + b for a in ALPHABET for b in ALPHABET]
NOTED = {
    Phase.FETCH.value: "fetches its inputs",
    Phase.BUILD.value: "builds its environment",
    Phase.START.value: "starts its sandbox",
    Phase.RUN.value: "runs",
    Phase.COLLECT.value: "collects its outputs",
    PREEMPTING: "asked to make room for others",
    RECLAIMING: "asked to make room for the owner of its node",
    UNFUNDED: "asked to stop: its max_cost, or its payer's funds or budget, is used up",
}
"""Texts for the notes of an attempt, with the task as subject."""

_ORDER = {
    word: rank
    for rank, word in enumerate(
        (
            "queued",
            "leased",
            "fetch",
            "build",
            "start",
            "started",
            "run",
            PREEMPTING,
            RECLAIMING,
            UNFUNDED,
            "collect",
            "checkpoint",
        )
    )
}
LAST = len(_ORDER)
"""Rank of an end: the last of events with the same time and epoch."""


def encode_many(kind: str, numbers: Iterable[int]) -> list[str]:
    encoded = []
    stem, stem_of = "", -1
    for number in numbers:
        high = number >> 10
        if high != stem_of:
            stem_of, stem = high, encode(kind, number)[:-2]
        encoded.append(stem + _LAST_TWO[number & 1023])
    return encoded


def result_lines(results: Iterable[BatchResult], reader: UserId) -> bytes:
    return _encoder.encode_lines(_results(results, reader))


def result_list(results: Iterable[BatchResult], reader: UserId) -> bytes:
    return _encoder.encode(_results(results, reader))


def _results(results: Iterable[BatchResult], reader: UserId) -> list[ResultLine]:
    rows = list(results)
    nodes = {node: encode("node", node) for node in {row.node for row in rows} if node is not None}
    return [
        ResultLine(
            name,
            row.position,
            row.sequence,
            row.status,
            row.reason,
            row.exit_code,
            row.value,
            row.value_sha256,
            row.error_text or "",
            (),
            None if row.node is None else nodes[row.node],
            row.node_name,
            row.node_owner == reader,
            None,
            row.printed,
        )
        for name, row in zip(encode_many("task", [row.task for row in rows]), rows, strict=True)
    ]


def result(view: TaskView, reader: UserId, printed: bool) -> bytes:
    row = view.row
    return _encoder.encode(
        ResultLine(
            encode("task", row.id),
            row.position,
            view.sequence,
            row.status,
            row.reason,
            row.exit_code,
            view.value,
            view.value_sha256,
            row.error_text or "",
            _outputs(view),
            None if row.node is None else encode("node", row.node),
            view.node_name,
            view.node_owner == reader,
            _on(view),
            printed,
        )
    )


def _on(view: TaskView) -> str:
    on = view.spec.requirements.on
    return owners.ANYONE if on is None else on.asked


def _outputs(view: TaskView) -> tuple[OutputFile, ...]:
    if not view.outputs:
        return ()
    is_asked_for = fields.asked_for(view.spec.outputs)
    return tuple(file for file in view.outputs if is_asked_for(file.path))


def task(
    view: TaskView,
    closeness: str | None = None,
    verification: VerificationDocument | None = None,
) -> TaskDocument:
    row, spec = view.row, view.spec
    asked = spec.requirements
    return TaskDocument(
        id=encode("task", row.id),
        name=spec.name,
        kind=spec.kind.value,
        status=row.status.value,
        status_text=row.status.text,
        created_at=instant_to_datetime(row.created_at),
        started_at=_maybe(row.started_at),
        finished_at=_maybe(row.finished_at),
        batch=encode("batch", row.batch),
        position=row.position,
        user=encode("user", row.user),
        team=None if row.team is None else encode("team", row.team),
        epoch=row.epoch,
        node=encode("node", row.node) if row.node is not None else None,
        node_name=view.node_name,
        slices=[slice_(part) for part in (row.allocation.slices if row.allocation else ())],
        command=list(spec.command),
        gpu=gpu.format(asked.gpu) if asked.gpu else None,
        priority=spec.priority,
        exit_code=row.exit_code,
        reason=row.reason.value if row.reason else None,
        error_text=row.error_text,
        tries=row.tries,
        losses=row.losses,
        outputs=[output(file) for file in _outputs(view)],
        phase=phase_of(view),
        network=asked.network.value,
        environment=spec.environment,
        preemptible=spec.preemptible or bool(spec.checkpoint),
        by=None if spec.by is None else instant_to_datetime(spec.by),
        checkpoint=None if view.checkpoint is None else _checkpoint(view.checkpoint),
        nodes=asked.nodes,
        members=[_member(member) for member in view.members],
        cpus=asked.cpu_milli / 1000,
        memory_bytes=asked.memory_bytes,
        disk_bytes=asked.disk_bytes,
        tier=asked.tier.value,
        timeout_s=spec.timeout / 1e6,
        retries=spec.retries,
        labels=list(asked.labels),
        max_price=None
        if asked.max_price_microcredits is None
        else fields.format_price(asked.max_price_microcredits),
        max_cost_microcredits=view.record.max_cost,
        cost_microcredits=_cost(view, verification),
        reserved_microcredits=None if view.cost is None else view.cost.reserved,
        engine=spec.engine.value,
        on_loss=spec.on_loss.value,
        on=_on(view),
        expired_at=_maybe(view.record.shrunk_at),
        shares=["cpus"] * asked.cpu_by_gpus + ["memory"] * asked.memory_by_gpus,
        granted_cpus=None if row.allocation is None else row.allocation.cpu_milli / 1000,
        granted_memory_bytes=None if row.allocation is None else row.allocation.memory_bytes,
        closeness=closeness,
        verify=_verify(spec),
        verification=verification,
        progress=_progress(view),
    )


def _verify(spec: TaskSpec) -> int | Literal["spot", "check"] | None:
    if spec.check_sha256:
        return "check"
    siblings = spec.requirements.siblings
    return "spot" if siblings == SPOT else siblings or None


def _cost(view: TaskView, verification: VerificationDocument | None) -> int | None:
    if verification is not None:
        return verification.cost_microcredits
    return None if view.cost is None else view.cost.charged


def _progress(view: TaskView) -> ReportedProgress | None:
    if not view.record.progress:
        return None
    found = from_stored(view.record.progress)
    if found.epoch != view.row.epoch:
        return None  # of an attempt before the present one
    at = instant_to_datetime(found.at)
    return ReportedProgress(fraction=found.millionths / WHOLE, text=found.text, at=at)


def _member(view: MemberView) -> MemberDocument:
    return MemberDocument(
        rank=view.rank,
        node=encode("node", view.node),
        node_name=view.node_name,
        status=view.status,
        exit_code=view.exit_code,
    )


def phase_of(view: TaskView) -> str | None:
    if view.row.status is TaskStatus.RUNNING:
        return Phase.COLLECT.value if view.note == Phase.COLLECT else Phase.RUN.value
    return view.note if view.row.status is TaskStatus.LEASED else None


def progress(view: TaskView) -> ProgressDocument:
    row = view.row
    return ProgressDocument(epoch=row.epoch, status=row.status.value, phase=phase_of(view))


def _checkpoint(saved: SavedCheckpoint) -> CheckpointDocument:
    return CheckpointDocument(
        saved_at=instant_to_datetime(saved.saved_at),
        size_bytes=saved.size_bytes,
        files=saved.files,
        epoch=saved.epoch,
    )


def slice_(part: Slice) -> GpuSliceDocument:
    return GpuSliceDocument(
        index=part.gpu_index, memory_bytes=part.memory_bytes, share=part.share_milli / 1000
    )


def output(file: OutputFile) -> OutputDocument:
    return OutputDocument(
        path=file.path,
        sha256=file.sha256,
        size_bytes=file.size_bytes,
        executable=file.executable,
    )


def batch(value: Batch, counts: Mapping[TaskStatus, int] | None = None) -> BatchDocument:
    """`counts`: tasks by status, if they were counted."""
    by_status: dict[str, int] = {}
    if counts is not None:
        held = counts.get(TaskStatus.LEASED, 0) + counts.get(TaskStatus.RUNNING, 0)
        ends = (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED)
        by_status = {status.value: counts.get(status, 0) for status in ends} | {"running": held}
    return BatchDocument(
        id=encode("batch", value.id),
        name=value.name,
        total=value.total,
        done=value.done,
        closed=value.closed,
        created_at=instant_to_datetime(value.created_at),
        **by_status,
    )


def events(story: TaskStory) -> list[EventDocument]:
    row = story.row
    found = [_event(row.created_at, "queued", 0, None, "submitted; waiting for a node")]
    for attempt in sorted(story.attempts, key=lambda attempt: attempt.epoch):
        found += _attempt(attempt)
    found += _current(row, {attempt.epoch for attempt in story.attempts})
    found += _noted(story)
    return sorted(found, key=lambda event: (event.at, event.epoch, _ORDER.get(event.event, LAST)))


def _noted(story: TaskStory) -> list[EventDocument]:
    nodes: dict[int, NodeId] = {attempt.epoch: attempt.node for attempt in story.attempts}
    if story.row.node is not None:
        nodes.setdefault(story.row.epoch, story.row.node)
    found = [
        _event(note.at, note.note, note.epoch, nodes.get(note.epoch), NOTED[note.note])
        for note in story.notes
    ]
    saved = story.checkpoint
    if saved is not None:
        text = f"saved a checkpoint: {saved.files} files, {saved.size_bytes} bytes"
        where = nodes.get(saved.epoch)
        found.append(_event(saved.saved_at, "checkpoint", saved.epoch, where, text))
    return found


def _attempt(attempt: AttemptRow) -> list[EventDocument]:
    epoch, node = attempt.epoch, attempt.node
    found = [_event(attempt.leased_at, "leased", epoch, node, f"leased to a node (epoch {epoch})")]
    if attempt.started_at is not None:
        found.append(_event(attempt.started_at, "started", epoch, node, "started"))
    text = f"the attempt ended: {attempt.reason.value.replace('_', ' ')}; back in the queue"
    if attempt.detail:
        text += f" ({attempt.detail[:200]})"
    found.append(_event(attempt.ended_at, attempt.reason.value, epoch, node, text))
    return found


def _current(row: TaskRow, archived: set[int]) -> list[EventDocument]:
    found = []
    if row.epoch not in archived and row.node is not None:
        if row.leased_at is not None:
            text = f"leased to a node (epoch {row.epoch})"
            found.append(_event(row.leased_at, "leased", row.epoch, row.node, text))
        if row.started_at is not None:
            found.append(_event(row.started_at, "started", row.epoch, row.node, "started"))
    if row.finished_at is not None:
        text = row.status.text
        if row.reason is not None:
            text += f": {row.reason.value.replace('_', ' ')}"
        if row.exit_code is not None:
            text += f" with code {row.exit_code}"
        found.append(_event(row.finished_at, row.status.value, row.epoch, row.node, text))
    return found


def _event(at: Instant, event: str, epoch: int, node: int | None, text: str) -> EventDocument:
    return EventDocument(
        at=instant_to_datetime(at),
        event=event,
        epoch=epoch,
        node=encode("node", node) if node is not None else None,
        text=text,
    )


def _maybe(at: Instant | None) -> datetime | None:
    return instant_to_datetime(at) if at is not None else None
