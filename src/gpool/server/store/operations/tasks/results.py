"""Results of ended tasks as rows, for their batch's readers and for requests that wait for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.server.store.protocol import Operation, Parameters, Relations
from gpool.server.store.rows import NONE, REASON, STATUS, of_ids, select_pairs
from gpool.server.store.sealing import ERROR_TEXT, VALUE, opened
from gpool.server.store.values import BatchResult

PRINTED = "(t.log_sha256 <> '' OR EXISTS (SELECT 1 FROM log_heads h WHERE h.task_id = t.id))"
"""SQL condition: the task has output."""


class _Result(NamedTuple):
    sequence: int
    position: int
    id: TaskId
    status: str
    reason: str
    exit_code: int | None
    value: bytes | None
    value_sha256: str
    error_text: str | None
    printed: int


class _ResultNode(NamedTuple):
    id: NodeId | None
    name: str | None
    owner_id: UserId | None


def results(
    source: str, condition: str, parameters: Parameters, relations: Relations = NONE
) -> Operation[tuple[BatchResult, ...]]:
    pairs = yield from select_pairs(
        _Result,
        _ResultNode,
        "SELECT t.sequence, t.position, t.id, t.status, t.reason, t.exit_code, t.value, t.value_sha256, t.error_text, "  # noqa: S608
        f"CASE WHEN {PRINTED} THEN 1 ELSE 0 END, t.node_id, n.name, n.owner_id "
        f"FROM {source} LEFT JOIN nodes n ON n.id = t.node_id {condition}",
        parameters,
        relations,
    )
    found = yield from opened([row for row, _ in pairs], VALUE, ERROR_TEXT)
    return tuple(
        BatchResult(
            row.sequence,
            row.position,
            row.id,
            STATUS[row.status],
            REASON[row.reason],
            row.exit_code,
            bytes(row.value or b""),
            row.value_sha256,
            row.error_text or "",
            node.id,
            node.name,
            node.owner_id,
            bool(row.printed),
        )
        for row, (_, node) in zip(found, pairs, strict=True)
    )


def results_of(tasks: Collection[TaskId]) -> Operation[tuple[BatchResult, ...]]:
    """Results of those of the tasks that have ended."""
    return (
        yield from results(
            "{wanted} AS w JOIN tasks t ON t.id = w.id",
            "WHERE t.sequence IS NOT NULL",
            NONE,
            {"wanted": of_ids(tasks)},
        )
    )
