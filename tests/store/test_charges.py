"""Meters and charges: set aside with the grant, charged with the end, posted later; on both databases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import (
    SECOND,
    EndReason,
    Instant,
    OutputFile,
    Slice,
    TaskKind,
    TaskSpec,
    TaskStatus,
)
from gpool.core.money.charging import AHEAD, FrozenPrice, set_aside, total_charge
from gpool.core.money.transfers import (
    AccountKind,
    Grant,
    LedgerAccountId,
    TransferId,
    TransferOutcome,
)
from gpool.core.scheduler.order.limits import Holder
from gpool.server.actions.money.verification import verify
from gpool.server.store.generated_rows import (
    ChargesRecord,
    MetersRecord,
    ProjectsRecord,
    UsageTotalsRecord,
)
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.money import accounts as ledger
from gpool.server.store.operations.money import charges, limits, meters
from gpool.server.store.operations.money.accounts import NewAccount
from gpool.server.store.operations.money.funding import Funding, PlaceTerms
from gpool.server.store.operations.money.transfers import record_transfers
from gpool.server.store.operations.money.usage import (
    FIRST_TOTAL,
    MonthRange,
    TotalsBy,
    TotalsPosition,
    totals,
)
from gpool.server.store.operations.tasks import artifacts, deletion
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import select
from gpool.server.store.values import RECLAIMING, UNFUNDED, AppliedPlan
from gpool.wire.frames import Checkpointed, HandedBack, Started
from tests.store.gang_pool import Site, gang_spec, site_of
from tests.store.store_pool import CPU, Pool, exited, race, returned

PRICE = FrozenPrice(3_600_000_000, 500)  # 1,000,000 micro-credits a second, and a minimum
S = 1_000_000  # of both: a second costs a credit
AHEAD_COST = set_aside(PRICE, 0)
SAVES = TaskSpec(TaskKind.COMMAND, "true", command=("true",), checkpoint="state/")
FEE_PPM = 100_000


@operation
def granted(account: NewAccount, amount: int, id_: str, at: Instant) -> Operation[None]:
    opened = yield from ledger.open_accounts([account])
    yield from record_transfers(
        [Grant(TransferId(id_), opened[account.holder, account.kind], amount)], at
    )


@operation
def rows(record: type[NamedTuple], table: str) -> Operation[list[Any]]:
    names = ", ".join(record._fields)
    return (yield from select(record, f"SELECT {names} FROM {table} ORDER BY 1, 2, 3"))  # noqa: S608


class Priced:
    """A pool whose only node has a price; ann, its owner here, pays as any other user would."""

    def __init__(self, pool: Pool, balance: int = 10 * AHEAD_COST) -> None:
        self.pool = pool
        self.node = pool.node("box", gpus=1)
        if balance:
            self.give(balance)

    def give(self, amount: int) -> None:
        account = NewAccount(
            ("user", self.pool.ann), AccountKind.USER, LedgerAccountId(next(self.pool.numbers))
        )
        self.pool.write(granted(account, amount, f"g{next(self.pool.numbers)}", self.pool.now()))

    def grant(
        self, tasks: Sequence[TaskId], epoch: int = 1, number: int = 0, price: FrozenPrice = PRICE
    ) -> AppliedPlan:
        pool = self.pool
        place = pool.place(
            self.node, tasks, epoch, replace(CPU, number=number, slices=(Slice(0, 1 << 30, 500),))
        )
        terms = PlaceTerms(price, pool.ann, '[{"model":"H100","slice":"0.5","position":0}]')
        wanted = [
            NewAccount(("user", pool.ann), kind, LedgerAccountId(next(pool.numbers)))
            for kind in (AccountKind.USER, AccountKind.PENDING, AccountKind.VESTING)
        ]
        funding = Funding({(self.node, number): terms}, tuple(wanted), FEE_PPM)
        return pool.write(leases.apply_plan([place], pool.term, pool.now(), funding=funding))

    def running(self, **options: Any) -> TaskId:
        (task,) = self.pool.submit(**options)
        assert self.grant([task]).refused == ()
        self.pool.record(self.node, Started(task, 1))
        return task

    def balances(self) -> dict[str, int]:
        found = self.pool.read(ledger.balances(("user", self.pool.ann)))
        return {row.kind: row.balance for row in found}

    @property
    def charges(self) -> list[ChargesRecord]:
        return self.pool.read(rows(ChargesRecord, "charges"))

    @property
    def meters(self) -> list[MetersRecord]:
        return self.pool.read(rows(MetersRecord, "meters"))

    def settle(self) -> None:
        while self.pool.write(meters.settle(self.pool.now(), 100)):
            pass

    def check_books(self) -> None:
        report = self.pool.database.run(verify(self.pool.database.store))
        assert report.findings == ()


@pytest.fixture
def priced(pool: Pool) -> Priced:
    return Priced(pool)


def test_funds_are_set_aside_with_the_grant_and_paid_to_owner_and_fee_at_the_end(
    priced: Priced,
) -> None:
    pool = priced.pool
    (task,) = pool.submit()
    before = priced.balances()["user"]
    priced.grant([task])
    assert priced.balances() == {"user": before - AHEAD_COST, "pending": AHEAD_COST, "vesting": 0}
    pool.record(priced.node, Started(task, 1))
    pool.record(priced.node, exited(task, code=0))
    (row,) = priced.charges
    assert (row.state, row.charged_us, row.microcredits, row.fee) == ("metered", S, S, S // 10)
    (meter,) = priced.meters
    assert meter.closed_at is not None
    priced.settle()
    assert priced.meters == []
    (row,) = priced.charges
    assert (row.state, row.transfer_id) == ("posted", f"post:alloc:{task}:1:0:0")
    assert priced.balances() == {"user": before - S, "pending": 0, "vesting": S - S // 10}
    assert pool.view(task).cost == (S, 0)
    priced.check_books()


def test_without_funds_nothing_is_granted_and_the_refusal_has_the_figures(pool: Pool) -> None:
    priced = Priced(pool, balance=AHEAD_COST - 1)
    (task,) = pool.submit()
    applied = priced.grant([task])
    assert applied.lines == ()
    (place,) = applied.unfunded
    assert (place.tasks, place.payer) == ((task,), ("user", pool.ann))
    assert (place.outcome, place.needed) == (TransferOutcome.NO_FUNDS, AHEAD_COST)
    assert pool.view(task).row.status is TaskStatus.QUEUED
    assert priced.meters == []
    found = pool.read(limits.funds([place.payer], pool.now()))[place.payer]
    assert not found.allows(place.needed)
    priced.give(1)
    assert pool.read(limits.funds([place.payer], pool.now()))[place.payer].allows(place.needed)
    assert priced.grant([task]).lines


def test_a_budget_refuses_a_start_as_missing_funds_do(priced: Priced) -> None:
    pool = priced.pool
    payer = NewAccount(("user", pool.ann), AccountKind.USER, LedgerAccountId(1))
    pool.write(ledger.set_budget(payer, AHEAD_COST - 1, pool.now()))
    (task,) = pool.submit()
    (place,) = priced.grant([task]).unfunded
    assert place.outcome is TransferOutcome.OVER_BUDGET


def test_leases_of_one_allocation_share_its_meter_and_never_exceed_its_wall_time(
    priced: Priced,
) -> None:
    pool = priced.pool
    first, second, third = pool.submit(3)
    priced.grant([first, second])
    priced.grant([third])  # behind them
    (meter,) = priced.meters
    assert meter.leases == 3
    opened = meter.until
    liar = replace_duration(returned(first), 1 << 50)
    pool.record(priced.node, liar, replace_duration(returned(second), 400_000))
    pool.record(priced.node, returned(third))
    at = priced.meters[0].closed_at
    assert at is not None
    assert len(priced.charges) == 3
    assert sum(row.charged_us for row in priced.charges) <= at - opened
    assert sum(row.microcredits for row in priced.charges) <= total_charge(PRICE, at - opened)
    by_task = {row.task_id: row.charged_us for row in priced.charges}
    assert by_task[second] == 400_000  # claims divide the time between them
    priced.settle()
    priced.check_books()


def test_calls_reported_together_are_charged_what_each_claims(priced: Priced) -> None:
    """Starts of calls are not reported: each ran before the next one, and all of them within the allocation's time."""
    pool = priced.pool
    tasks = pool.submit(4)
    priced.grant(tasks)
    claimed = (100_000, 200_000, 300_000, 150_000)
    ends = [replace_duration(returned(task), us) for task, us in zip(tasks, claimed, strict=True)]
    pool.record(priced.node, *ends)
    assert [row.charged_us for row in priced.charges] == list(claimed)
    assert sum(row.microcredits for row in priced.charges) == sum(claimed)


def replace_duration(item: Any, duration_us: int) -> Any:
    return msgspec.structs.replace(item, duration_us=duration_us)


def test_a_repeated_report_charges_once(priced: Priced) -> None:
    task = priced.running()
    for _ in range(3):
        priced.pool.record(priced.node, exited(task, code=0))
    assert len(priced.charges) == 1


def test_a_lost_node_costs_nothing(priced: Priced) -> None:
    priced.running()
    priced.pool.expire(priced.node)
    assert priced.charges == []
    before = priced.balances()
    priced.settle()
    assert priced.balances()["user"] == before["user"] + AHEAD_COST
    priced.check_books()


def test_a_cancelled_task_is_charged_until_its_cancellation(priced: Priced) -> None:
    pool = priced.pool
    task = priced.running()
    pool.cancel(task)
    for _ in range(20):
        pool.now()
    pool.record(priced.node, HandedBack(task, 1))
    (row,) = priced.charges
    assert (row.reason, row.charged_us) == ("cancelled", S)


@pytest.mark.parametrize(
    ("because", "saves", "seconds"),
    [(None, False, 0), (None, True, 1), (RECLAIMING, True, 0), ("unasked", True, 0)],
)
def test_preempted_work_is_charged_to_its_checkpoint_and_reclaimed_work_is_free(
    priced: Priced, because: str | None, saves: bool, seconds: int
) -> None:
    pool = priced.pool
    task = priced.running(spec=SAVES)
    if saves:
        sha256 = "a" * 64
        pool.write(artifacts.add_artifact(sha256, 1, None, priced.node, (task, 1), pool.now()))
        pool.record(priced.node, Checkpointed(task, 1, (OutputFile("state/x", sha256, 1),)))
        seconds = seconds and 2
    if because != "unasked":
        pool.write(grants.preempt([task], pool.now(), because))
    pool.record(priced.node, HandedBack(task, 1))
    charged = [("preempted", seconds * S)] if seconds else []
    assert [(row.reason, row.charged_us) for row in priced.charges] == charged
    assert pool.view(task).row.status is TaskStatus.QUEUED


def test_a_task_stopped_for_lack_of_funds_ends_and_is_charged(priced: Priced) -> None:
    pool = priced.pool
    task = priced.running()
    pool.write(grants.preempt([task], pool.now(), UNFUNDED))
    done = pool.record(priced.node, HandedBack(task, 1))
    assert [each.task for each in done.ended] == [task]
    assert (done.requeued, done.released) == ((), (task,))
    row = pool.view(task).row
    assert (row.status, row.reason) == (TaskStatus.FAILED, EndReason.OUT_OF_FUNDS)
    assert [each.microcredits for each in priced.charges] == [2 * S]


def test_max_cost_holds_over_all_attempts_to_the_microcredit(priced: Priced) -> None:
    pool = priced.pool
    retries = replace(SAVES, checkpoint="", retries=9)
    cap = 2 * S + S // 2 + 1
    (task,) = pool.submit(spec=retries, max_cost=cap)
    for epoch in (1, 2, 3):
        assert priced.grant([task], epoch).lines
        assert priced.meters[0].reserved <= cap
        pool.record(priced.node, Started(task, epoch))
        pool.record(priced.node, exited(task, epoch))
        priced.settle()
    row = pool.view(task).row
    assert (row.status, row.reason) == (TaskStatus.FAILED, EndReason.OUT_OF_FUNDS)
    assert sum(each.microcredits for each in priced.charges) == cap
    priced.check_books()


def test_a_reservation_rolls_and_pays_the_owner_while_the_allocation_lives(priced: Priced) -> None:
    pool = priced.pool
    first, second = pool.submit(2)
    priced.grant([first, second])
    pool.record(priced.node, Started(first, 1))
    pool.record(priced.node, exited(first, code=0))
    at = Instant(pool.now() + AHEAD // 2)
    assert pool.read(meters.due(at))
    assert pool.write(meters.extend(at, 10)).count == 1
    (meter,) = priced.meters
    assert (meter.roll, meter.posted) == (1, meter.charged)
    assert meter.renew_at > at
    assert priced.balances()["vesting"] == S - S // 10
    assert priced.balances()["pending"] == meter.reserved - meter.posted
    assert pool.write(meters.extend(at, 10)).count == 0
    priced.check_books()


def test_a_reservation_that_cannot_be_extended_is_reported_and_stays(pool: Pool) -> None:
    priced = Priced(pool, balance=AHEAD_COST)
    task = priced.running()
    at = Instant(pool.now() + AHEAD - 10 * SECOND)
    (short,) = pool.write(meters.extend(at, 10)).short
    assert short.outcome is TransferOutcome.NO_FUNDS
    assert short.until - at <= 10 * SECOND
    assert [each.id for each in pool.read(limits.running_on([short]))] == [task]
    assert priced.balances() == {"user": 0, "pending": AHEAD_COST, "vesting": 0}
    late = Instant(
        at + 3600 * SECOND
    )  # the server was away: the charge is cut at what was set aside
    pool.write(leases.record([(priced.node, [exited(task, code=0)])], late))
    priced.settle()
    assert sum(row.microcredits for row in priced.charges) == AHEAD_COST
    priced.check_books()


def test_capped_leases_say_when_their_cap_is_reached(priced: Priced) -> None:
    pool = priced.pool
    task = priced.running(max_cost=10 * S)
    started = pool.view(task).row.started_at
    ((lease, left),) = pool.read(limits.capped_leases())[task]
    assert left == 10 * S
    assert started is not None
    assert 0 <= limits.cap_at(lease, left) - (started + 10 * S) <= 1


@pytest.mark.parametrize("settled_first", [True, False])
@pytest.mark.parametrize("accepted", [True, False])
def test_held_charges_wait_for_the_verdict(
    priced: Priced, accepted: bool, settled_first: bool
) -> None:
    pool = priced.pool
    task = priced.running(settlement="verdict")
    before = priced.balances()
    pool.record(priced.node, exited(task, code=0))
    if settled_first:
        priced.settle()
        assert [row.reserve_id for row in priced.charges] == [f"held:{task}:1"]
        assert priced.balances() == {
            "user": before["user"] + AHEAD_COST - S,
            "pending": S,
            "vesting": 0,
        }
    assert [row.state for row in priced.charges] == ["held"]
    resolve = charges.accept_held if accepted else charges.reject_held
    assert pool.write(resolve([task], pool.now())) == 1
    assert pool.write(resolve([task], pool.now())) == 0
    priced.settle()
    paid = S if accepted else 0
    assert priced.balances() == {
        "user": before["user"] + AHEAD_COST - paid,
        "pending": 0,
        "vesting": paid - paid // 10,
    }
    assert [row.state for row in priced.charges] == ["posted" if accepted else "void"]
    priced.check_books()


def test_totals_of_use_are_kept_without_prices(pool: Pool) -> None:
    node = pool.node("box", gpus=1)
    (task, other) = pool.submit(2)
    pool.grant(node, [task], slices=(Slice(0, 1 << 30, 500),))
    pool.grant(node, [other], number=1)
    pool.record(node, Started(task, 1), Started(other, 1))
    pool.record(node, exited(task, code=0), exited(other, code=0))
    found = pool.read(rows(UsageTotalsRecord, "usage_totals"))
    by_model = {row.model: (row.attempts, row.task_us, row.gpu_us) for row in found}
    assert by_model == {"H100": (1, S, S // 2), "": (1, S, 0)}
    assert {(row.kind, row.id, row.node_id) for row in found} == {("user", pool.ann, node)}


def test_totals_are_grouped_by_every_column_and_read_in_pages(pool: Pool) -> None:
    node = pool.node("box", gpus=1)
    (task, other) = pool.submit(2)
    pool.grant(node, [task], slices=(Slice(0, 1 << 30, 500),))
    pool.grant(node, [other], number=1)
    pool.record(node, Started(task, 1), Started(other, 1))
    pool.record(node, exited(task, code=0), exited(other, code=0))
    [month] = {row.month for row in pool.read(rows(UsageTotalsRecord, "usage_totals"))}
    holder: Holder = ("user", pool.ann)
    span = MonthRange(month - 1, month)

    def found(
        by: TotalsBy, after: TotalsPosition = FIRST_TOTAL, limit: int = 10
    ) -> list[tuple[object, ...]]:
        return [tuple(row) for row in pool.read(totals(holder, span, by, after, limit))]

    assert found(TotalsBy.GPU) == [("used", "", 1, S, 0), ("used", "H100", 1, S, S // 2)]
    assert found(TotalsBy.GPU, TotalsPosition("used", ""), 1) == [("used", "H100", 1, S, S // 2)]
    both = (2, 2 * S, S // 2)
    assert found(TotalsBy.NODE) == [("used", str(node), *both)]
    assert found(TotalsBy.MONTH) == [("used", str(month), *both)]
    assert found(TotalsBy.TEAM) == [("used", "", *both)]


def test_totals_have_the_project_of_the_spec_and_owners_see_no_labels(pool: Pool) -> None:
    node, bob = pool.node("box"), pool.user("bob")
    tasks = [
        *pool.submit(2, project="thesis", user=bob),
        *pool.submit(1, project="course", user=bob),
        *pool.submit(1, user=bob),
    ]
    for number, task in enumerate(tasks):
        pool.grant(node, [task], number=number)
    pool.record(node, *(Started(task, 1) for task in tasks))
    pool.record(node, *(exited(task, code=0) for task in tasks))
    found = pool.read(rows(UsageTotalsRecord, "usage_totals"))
    assert {row.project: row.attempts for row in found} == {"": 1, "course": 1, "thesis": 2}
    span = MonthRange(found[0].month, found[0].month)
    used = pool.read(totals(("user", bob), span, TotalsBy.PROJECT, FIRST_TOTAL, 10))
    assert [(row.name, row.attempts) for row in used] == [("", 1), ("course", 1), ("thesis", 2)]
    served = pool.read(totals(("user", pool.ann), span, TotalsBy.PROJECT, FIRST_TOTAL, 10))
    assert [(row.side, row.name, row.attempts) for row in served] == [("served", "", 4)]


def test_a_charge_has_its_project_until_the_account_is_deleted(priced: Priced) -> None:
    pool = priced.pool
    task = priced.running(project="thesis")
    pool.record(priced.node, exited(task, code=0))
    priced.settle()
    (row,) = priced.charges
    assert row.project == "thesis"
    pool.write(forgotten(("user", pool.ann)))
    (after,) = priced.charges
    assert after == row._replace(project="")
    assert pool.read(rows(ProjectsRecord, "projects")) == []
    assert pool.read(rows(UsageTotalsRecord, "usage_totals")) == []
    priced.check_books()


@operation
def forgotten(holder: Holder) -> Operation[None]:
    yield from ledger.forget_holder(holder)


@operation
def executed(sql: str) -> Operation[None]:
    yield Statement(sql)


def test_a_meter_whose_leases_ended_without_it_is_swept_and_found_by_verification(
    priced: Priced,
) -> None:
    pool = priced.pool
    task = priced.running()
    assert not pool.read(meters.has_unheld())
    pool.write(executed("UPDATE tasks SET metered = 0, holding = 0"))
    assert pool.read(meters.has_unheld())
    report = pool.database.run(verify(pool.database.store))
    assert [each.thing for each in report.findings] == [f"meter {task}/1"]
    pool.write(meters.close_unheld(pool.now()))
    priced.settle()
    assert priced.balances()["pending"] == 0
    priced.check_books()


def test_a_changed_charge_is_found_by_verification(priced: Priced) -> None:
    pool = priced.pool
    task = priced.running()
    pool.record(priced.node, exited(task, code=0))
    priced.settle()
    pool.write(executed("UPDATE charges SET microcredits = microcredits + 1"))
    report = pool.database.run(verify(pool.database.store))
    [transfer, account] = [each.thing for each in report.findings]
    assert transfer == f"transfer post:alloc:{task}:1:0:0"
    assert account.startswith("account ")  # of the earnings that have not vested


def test_charges_outlive_their_task(priced: Priced) -> None:
    pool = priced.pool
    task = priced.running()
    pool.record(priced.node, exited(task, code=0))
    assert pool.write(deletion.delete_tasks([task])).tasks
    assert [row.task_id for row in priced.charges] == [task]
    priced.settle()
    assert [row.state for row in priced.charges] == ["posted"]
    priced.check_books()


def priced_gang(pool: Pool, balance: int) -> tuple[Priced, Site, TaskId, AppliedPlan]:
    priced, meeting = Priced(pool, balance), site_of(pool)
    spec = gang_spec()
    (task,) = pool.submit(spec=spec, max_cost=None)
    wanted = [
        NewAccount(("user", pool.ann), kind, LedgerAccountId(next(pool.numbers)))
        for kind in (AccountKind.USER, AccountKind.PENDING, AccountKind.VESTING)
    ]
    place = meeting.place(task, spec)
    parts = [(place.node, place.allocation), *((m.node, m.allocation) for m in place.members)]
    terms = {(node, each.number): PlaceTerms(PRICE, pool.ann, "[]") for node, each in parts}
    funding = Funding(terms, tuple(wanted), FEE_PPM)
    applied = meeting.apply(place, gang_secrets={task: b"sealed"}, funding=funding)
    return priced, meeting, task, applied


def test_each_member_of_a_gang_is_metered_and_charged_to_the_end_of_the_gang(pool: Pool) -> None:
    priced, meeting, task, applied = priced_gang(pool, 2 * AHEAD_COST)
    assert applied.lines
    assert [(row.task_id, row.rank, row.leases) for row in priced.meters] == [
        (task, 0, 1),
        (task, 1, 1),
    ]
    for node in meeting.nodes[:2]:
        pool.record(node, Started(task, 1))
    for node in meeting.nodes[:2]:
        pool.record(node, exited(task, code=0))
    found = {row.node_id: row.charged_us for row in priced.charges}
    assert found == {meeting.nodes[0]: 3 * S, meeting.nodes[1]: 2 * S}
    priced.settle()
    assert pool.view(task).cost == (5 * S, 0)
    priced.check_books()


def test_a_gang_is_granted_only_with_funds_for_all_members(pool: Pool) -> None:
    priced, _, task, applied = priced_gang(pool, 2 * AHEAD_COST - 1)
    assert applied.lines == ()
    assert [(each.tasks, each.needed) for each in applied.unfunded] == [((task,), 2 * AHEAD_COST)]
    assert priced.meters == []
    assert priced.balances()["pending"] == 0


def test_replicas_that_end_leases_and_settle_at_once_charge_each_once(priced: Priced) -> None:
    pool = priced.pool
    tasks = pool.submit(12)
    priced.grant(tasks)
    now = pool.now()
    ends = [
        leases.record([(priced.node, [returned(task)])], Instant(now + n))
        for n, task in enumerate(tasks)
    ]
    rolls = [meters.extend(Instant(now + AHEAD), 10) for _ in range(4)]
    settles = [meters.settle(now, 10) for _ in range(4)]
    race(
        pool.database,
        [op for group in zip(ends[:4], rolls, settles, strict=True) for op in group] + ends[4:],
    )
    priced.settle()
    charges = priced.charges
    assert {row.state for row in charges} == {"posted"}
    assert len({row.task_id for row in charges}) == len(charges)
    first = min(row.started_at or 0 for row in charges)
    last = max(row.ended_at for row in charges)
    assert sum(row.charged_us for row in charges) == last - first
    assert last == now + len(tasks) - 1
    assert priced.meters == []
    assert priced.balances()["pending"] == 0
    priced.check_books()


def test_a_free_allocation_has_no_meter(priced: Priced) -> None:
    (task,) = priced.pool.submit()
    assert priced.pool.grant(NodeId(priced.node), [task]).lines
    assert priced.meters == []
    priced.pool.record(priced.node, Started(task, 1), exited(task, code=0))
    assert priced.charges == []
    assert priced.pool.view(task).cost is None
