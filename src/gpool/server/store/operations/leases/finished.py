"""Held tasks as reports find them, and checks of what a node says about an attempt that finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import SECOND, EndReason, Fault, Instant, Span
from gpool.core.permissions import TeamId
from gpool.server.store.generated_rows import TasksRecord
from gpool.server.store.operations.tasks.artifacts import NamedResult, missing_results
from gpool.server.store.operations.tasks.storage import Account, holder_of
from gpool.server.store.protocol import Operation
from gpool.server.store.rows import columns
from gpool.wire.frames import Finished

LATE = Span(10 * SECOND)
"""Delay that a report of an end may have more than the report of its start."""


class HeldTask(NamedTuple):
    id: TaskId
    epoch: int
    batch_id: BatchId
    spec_id: SpecId
    user_id: UserId
    status: str
    leased_at: Instant
    started_at: Instant | None
    tries: int
    losses: int
    queued_at: Instant | None
    node_id: NodeId
    team_id: TeamId | None
    allocation_number: int | None  # None: a gang
    allocation: str | None
    finished_at: Instant | None  # when it was cancelled
    max_cost: int | None
    settlement: str
    metered: int

    @property
    def account(self) -> Account:
        return holder_of(self.user_id, self.team_id)


HELD = columns(HeldTask, TasksRecord, "t")


def plausible_duration(claimed: int, leased_at: int, started_at: int | None, at: Instant) -> int:
    """Duration of an attempt in µs, for predictions: as its node claims, within bounds that the server saw.

    At most the time since the lease. If the start was reported, at least half of the time since then, less `LATE`: a
    node that claims less would have its owner's tasks predicted as short on every node. 0 means not measured.
    """
    if not claimed:
        return 0
    least = 0 if started_at is None else (at - started_at - LATE) // 2
    return min(max(claimed, least), max(0, at - leased_at))


def results_of(row: HeldTask, item: Finished) -> list[NamedResult]:
    found = [result_of(row, item.value_sha256)] if item.value_sha256 else []
    return found + [result_of(row, output.sha256) for output in item.outputs]


def without_missing(
    ends: Sequence[tuple[HeldTask, Finished]],
) -> Operation[list[tuple[HeldTask, Finished]]]:
    """Ends of successes; those that name a result which was never uploaded become `bad_output`."""
    missing = yield from missing_results([each for end in ends for each in results_of(*end)])
    return [
        (row, _bad_output(item) if missing.intersection(results_of(row, item)) else item)
        for row, item in ends
    ]


def _bad_output(item: Finished) -> Finished:
    return Finished(
        item.task,
        item.epoch,
        EndReason.BAD_OUTPUT,
        item.exit_code or None,
        error_text="its node named outputs that it never uploaded",
        duration_us=item.duration_us,
    )


def result_of(row: HeldTask, sha256: str) -> NamedResult:
    return NamedResult(sha256, row.id, row.epoch, row.spec_id, row.user_id)


def fault_in(item: Finished, *, begun: bool) -> Fault | None:
    """Fault of an attempt that could not start, else None.

    Older agents report no fault: without a reported start, such an attempt failed for an unclear reason.
    """
    if item.reason is not EndReason.SANDBOX_FAILED:
        return None
    return item.fault if item.fault is not None or begun else Fault.UNCLEAR
