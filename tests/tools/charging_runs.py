"""Lives of tasks under `max_cost` on a real SQLite file: retries, preemption, reclaim, losses, stops; drawn from a seed.

    python -m tests.tools.charging_runs FILE SEED FIRST LAST STEP

runs tasks FIRST to LAST and kills itself with SIGKILL before the STEP-th statement. The next step of a life is derived from the
stored rows alone, so a process that continues after a kill ends with the rows of one that was never killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import (
    SECOND,
    Allocation,
    EndReason,
    Instant,
    Offer,
    OutputFile,
    Permission,
    TaskKind,
    TaskSpec,
)
from gpool.core.money.charging import AHEAD, FrozenPrice
from gpool.core.money.transfers import AccountKind, Grant, LedgerAccountId, TransferId
from gpool.core.scheduler.state.events import LeaseGrant, Placement
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.store.drivers.sqlite import InlineStore, SqliteStore
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import users
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.money import meters
from gpool.server.store.operations.money.accounts import NewAccount, open_accounts
from gpool.server.store.operations.money.funding import Funding, PlaceTerms
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.operations.tasks import artifacts, submissions
from gpool.server.store.operations.tasks.submissions import NewTask, Submission
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select, values
from gpool.server.store.values import UNFUNDED, User
from gpool.wire.frames import Checkpointed, Finished, HandedBack, ReportItem, Started

T = TypeVar("T")
OWNER, PAYER, NODE = UserId(1), UserId(2), NodeId(100)
SPEC = TaskSpec(TaskKind.COMMAND, "work", command=("work",), checkpoint="state/", retries=5)
ACCOUNTS = (
    NewAccount(("user", PAYER), AccountKind.USER, LedgerAccountId(50)),
    NewAccount(("user", PAYER), AccountKind.PENDING, LedgerAccountId(51)),
    NewAccount(("user", OWNER), AccountKind.OWNER, LedgerAccountId(52)),
)
MONEY = 10**14
FEE_PPM = 30_000
BEGIN = 1_700_000_000 * SECOND
SAVED = "a" * 64


class _State(NamedTuple):
    status: str
    epoch: int
    max_cost: int
    started_at: int | None
    saved: int  # whether a checkpoint of this epoch exists
    asked: int  # whether the node was asked to stop


class TaskLife(NamedTuple):
    """Outcome of one life."""

    cost: int
    max_cost: int
    attempts: int
    reason: str


@operation
def _state(task: TaskId) -> Operation[_State | None]:
    rows = yield from select(
        _State,
        "SELECT t.status, t.epoch, t.max_cost, t.started_at, EXISTS (SELECT 1 FROM checkpoints c "
        "WHERE c.task_id = t.id AND c.epoch = t.epoch), EXISTS (SELECT 1 FROM attempt_notes n "
        "WHERE n.task_id = t.id AND n.epoch = t.epoch AND n.note = 'preempting') FROM tasks t WHERE t.id = :id",
        {"id": task},
    )
    return rows[0] if rows else None


@operation
def _life(task: TaskId) -> Operation[TaskLife]:
    [found] = yield from select(
        TaskLife,
        "SELECT COALESCE(SUM(c.microcredits), 0), t.max_cost, t.epoch, t.reason FROM tasks t "
        "LEFT JOIN charges c ON c.task_id = t.id WHERE t.id = :id",
        {"id": task},
    )
    return found


@operation
def _is_prepared() -> Operation[bool]:
    found = yield from values(int, "SELECT id FROM ledger_transfers WHERE id = 'grant:all'")
    return bool(found)


@operation
def _prepare(at: Instant) -> Operation[None]:
    for id_, name in ((OWNER, "owner"), (PAYER, "payer")):
        yield from users.create_user(User(id_, name, frozenset({Permission.PROVIDER}), at))
    offer = Offer(4000, 1 << 34, 1 << 36, ())
    yield from nodes.create_node(NODE, "box", OWNER, None, "secret", offer, [], at)
    yield from leases.take_term(at)
    yield from open_accounts(ACCOUNTS)
    yield from record_transfers([Grant(TransferId("grant:all"), ACCOUNTS[0].id, MONEY)], at)


class ChargedTasks:
    """`before`: called before each statement of a write."""

    def __init__(
        self, store: InlineStore, seed: int, before: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._seed, self._before = store, seed, before
        if not store.read_now(_is_prepared()):
            self._write(_prepare(Instant(BEGIN)))

    def run(self, number: int) -> TaskLife:
        task = TaskId(10_000 + number)
        for _ in range(500):
            state = self._store.read_now(_state(task))
            if state is not None and state.status in ("succeeded", "failed"):
                break
            self._step(task, number, state)
        self._settle(self._at(number, 40, 0))
        return self._store.read_now(_life(task))

    def _at(self, number: int, epoch: int, seconds: float) -> Instant:
        return Instant(BEGIN + (number * 50 + epoch) * 1000 * SECOND + round(seconds * SECOND))

    def _step(self, task: TaskId, number: int, state: _State | None) -> None:
        if state is None:
            self._submit(task, number)
            return
        dice = random.Random(f"{self._seed}/{number}/{state.epoch}")
        if state.status == "queued":
            self._settle(self._at(number, state.epoch, 900))
            self._grant(task, number, state.epoch + 1)
        elif state.status == "leased":
            self._report(task, self._at(number, state.epoch, 10), Started(task, state.epoch))
        else:
            self._go_on(task, number, state, dice)

    def _submit(self, task: TaskId, number: int) -> None:
        dice = random.Random(f"{self._seed}/{number}")
        submission = Submission(
            BatchId(30_000 + number),
            True,
            True,
            SpecId(20_000 + number),
            SPEC,
            PAYER,
            [NewTask(task, 0)],
            self._at(number, 0, 0),
            max_cost=dice.choice((1, 997, 20_000, 333_333, 5_000_000)),
        )
        self._write(submissions.submit([submission]))

    def _grant(self, task: TaskId, number: int, epoch: int) -> None:
        dice = random.Random(f"{self._seed}/{number}/price/{epoch}")
        price = FrozenPrice(dice.choice((7, 310_000, 3_600_000, 36_000_000)), dice.choice((0, 500)))
        allocation = Allocation(0, 1000, 1 << 30)
        shape = shape_of(SPEC, PAYER)
        place = Placement(NODE, allocation, shape, (LeaseGrant(task, epoch),))
        funding = Funding({(NODE, 0): PlaceTerms(price, OWNER, "[]")}, ACCOUNTS, FEE_PPM)
        at = self._at(number, epoch, 0)
        applied = self._write(leases.apply_plan([place], 1, at, funding=funding))
        assert applied.lines, applied

    def _go_on(self, task: TaskId, number: int, state: _State, dice: random.Random) -> None:
        """One attempt: perhaps a checkpoint, perhaps an extended reservation, then its end."""
        epoch = state.epoch
        ran = dice.choice((0.5, 30, 200, 700))
        end = dice.choice(("fail", "fail", "preempt", "reclaim", "lost", "unfunded", "succeed"))
        if not state.saved and dice.random() < 0.6:
            at = self._at(number, epoch, 10 + ran / 2)
            self._write(artifacts.add_artifact(SAVED, 1, None, NODE, (task, epoch), at))
            files = (OutputFile("state/x", SAVED, 1),)
            self._report(task, at, Checkpointed(task, epoch, files))
        if dice.random() < 0.7:
            for seconds in range(0, int(ran), AHEAD // SECOND // 2):
                self._write(meters.extend(self._at(number, epoch, 10 + seconds), 10))
        at = self._at(number, epoch, 10 + ran)
        if end in ("preempt", "unfunded") and not state.asked:
            self._write(grants.preempt([task], at, UNFUNDED if end == "unfunded" else None))
        if end == "lost":
            self._write(leases.expire(NODE, at))
        elif end in ("fail", "succeed"):
            code = int(end == "fail")
            claimed = dice.choice((0, 1000, 1 << 60))
            self._report(
                task, at, Finished(task, epoch, EndReason.EXITED, code, duration_us=claimed)
            )
        else:
            self._report(task, at, HandedBack(task, epoch))

    def _report(self, task: TaskId, at: Instant, item: ReportItem) -> None:
        assert item.task == task
        self._write(leases.record([(NODE, (item,))], at))

    def _settle(self, at: Instant) -> None:
        self._write(meters.settle(at, 10))

    def _write(self, op: Operation[T]) -> T:
        return self._store.write_now(_watched(op, self._before))


@operation
def _watched(op: Operation[T], before: Callable[[], None]) -> Operation[T]:
    rows: object = None
    while True:
        before()
        try:
            statement = op.send(rows)
        except StopIteration as stop:
            result: T = stop.value
            return result
        rows = yield statement


class _Countdown:
    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    path, seed, first, last, step = sys.argv[1:]
    with closing(SqliteStore.inline(Path(path), synchronous="OFF")) as store:
        tasks = ChargedTasks(store, int(seed), _Countdown(int(step)))
        for number in range(int(first), int(last)):
            tasks.run(number)


if __name__ == "__main__":
    main()
