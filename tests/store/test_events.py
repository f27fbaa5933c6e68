"""Operations of events on both databases: numbering, deliveries in order, conditions, retention."""

from __future__ import annotations

import pytest

from gpool.core.errors import Conflict
from gpool.core.model import SECOND, Instant
from gpool.server.actions.events.webhooks import new_destination
from gpool.server.store.operations.events import conditions, deliveries, destinations, outbox
from gpool.server.store.operations.events.conditions import (
    ConditionEvents,
    PoolCondition,
    SurveyTerms,
)
from gpool.server.store.operations.events.deliveries import FAILED, PENDING, SENT, SettledDelivery
from gpool.server.store.operations.events.outbox import POOL, EventHolder, NewEvent, add_events
from gpool.server.store.operations.leases import leases
from gpool.server.store.protocol import Operation, operation
from tests.store.store_pool import Pool

ADA: EventHolder = ("user", 7)
DATA = '{"task": "t"}'
T0 = Instant(1_000_000 * SECOND)


@operation
def added(*events: NewEvent) -> Operation[None]:
    yield from add_events(events)


def event(subject: int, kind: str = "task.failed", holder: EventHolder = ADA) -> NewEvent:
    return NewEvent(T0, kind, *holder, subject, 0, DATA)


def hook(pool: Pool, id_: int = 1, kinds: str = "*", status: str = "on") -> int:
    row = new_destination(id_, ADA, "standard", kinds, b"sealed", status, T0, "code")
    pool.database.write(destinations.add_destination(row))
    return id_


def test_events_get_growing_numbers_and_deliveries_by_kind(pool: Pool) -> None:
    term = pool.database.write(leases.take_term(T0))
    hook(pool, 1, "task.failed,node.lost")
    hook(pool, 2, "task.failed_too")
    hook(pool, 3, "*", "off")
    pool.database.write(added(event(1), event(2, "task.started"), event(3, holder=POOL)))
    found = pool.database.write(outbox.number_events(term, T0, 2))
    assert found.more
    assert [row.number for row in found.events] == [T0, T0 + 1]
    found = pool.database.write(outbox.number_events(term, Instant(T0 - 5), 2))
    assert [(row.number, row.holder_kind) for row in found.events] == [(T0 + 2, "pool")]
    assert not pool.database.read(outbox.has_outbox())
    rows = pool.database.read(outbox.events_after(ADA, T0, 10))
    assert [row.subject for row in rows] == [2]
    assert pool.database.read(deliveries.due_destinations(T0, 10)) == (1,)
    newest = pool.database.read(outbox.newest_after(T0 + 1, 10))
    assert [row.number for row in newest] == [pool.database.read(outbox.last_number())]
    assert pool.database.write(outbox.forget_events(Instant(T0 + 3), 10)) == 3
    assert not pool.database.read(deliveries.has_due(T0))


def test_of_one_task_the_oldest_pending_delivery_is_due(pool: Pool) -> None:
    term = pool.database.write(leases.take_term(T0))
    hook(pool)
    pool.database.write(added(event(1), event(1), event(2)))
    pool.database.write(outbox.number_events(term, T0, 10))

    def claimed(at: int, is_digest: bool = False) -> list[int]:
        taken = deliveries.claim(1, term, Instant(at), 10, is_digest=is_digest)
        return [each.event.number - T0 for each in pool.database.write(taken)]

    def settled(number: int, status: str, next_at: int) -> SettledDelivery:
        return SettledDelivery(1, T0 + number, 1, status, Instant(next_at), None, "")

    assert pool.database.write(deliveries.claim(1, term - 1, T0, 9, is_digest=False)) == ()
    assert claimed(T0) == [0, 2]
    assert claimed(T0) == []  # claimed for a while
    later = T0 + 300 * SECOND
    pool.database.write(deliveries.settle([settled(0, PENDING, later), settled(2, SENT, T0)], T0))
    assert claimed(later - 1) == []
    assert claimed(later) == [0]
    pool.database.write(deliveries.settle([settled(0, SENT, T0)], T0))  # of the first attempt
    second = SettledDelivery(1, T0, 2, FAILED, T0, 500, "no")
    pool.database.write(deliveries.settle([second], T0))
    assert claimed(later) == [1]
    page = pool.database.read(deliveries.delivery_page(1, T0 + 9, 2))
    assert [(row.number - T0, row.status) for row in page] == [(2, SENT), (1, PENDING)]
    assert pool.database.write(deliveries.replay(1, None, T0, T0)) == 1
    assert pool.database.write(deliveries.replay(1, T0 + 2, T0, T0)) == 1
    assert claimed(later + 300 * SECOND, is_digest=True) == [0, 1, 2]
    off = SettledDelivery(1, T0, 1, PENDING, T0, 410, "gone")
    pool.database.write(deliveries.settle([off], T0, "gone"))
    row = pool.database.read(destinations.destination(1))
    assert row is not None
    assert (row.status, row.why) == ("off", "gone")
    assert not pool.database.read(deliveries.has_due(Instant(later + 900 * SECOND)))


def test_conditions_begin_and_end_once(pool: Pool) -> None:
    term = pool.database.write(leases.take_term(T0))
    said = ConditionEvents("alert.firing", "alert.resolved", 0, (POOL, ADA), DATA)
    condition = PoolCondition("alert", "x", said)
    change = conditions.change_conditions
    assert pool.database.write(change([condition], [], [], term - 1, T0)) is None
    assert pool.database.write(change([condition], [], [], term, T0)) == 2
    assert pool.database.write(change([condition], [], [], term, T0)) == 0
    terms = SurveyTerms(frozenset({POOL, ADA}), T0, T0, 5)
    found = pool.database.read(conditions.survey(terms))
    assert found.stored == {("alert", "x")}
    own = SurveyTerms(frozenset({ADA}), T0, T0, 5)
    assert pool.database.read(conditions.survey(own)).stored == found.stored
    assert pool.database.write(change([], [("alert", "x")], [], term, T0)) == 2
    assert pool.database.write(change([], [("alert", "x")], [], term, T0)) == 0
    numbered = pool.database.write(outbox.number_events(term, T0, 10))
    assert [row.kind for row in numbered.events] == ["alert.firing"] * 2 + ["alert.resolved"] * 2


def test_readers_and_destinations_that_are_on_are_subscribers(pool: Pool) -> None:
    hook(pool, status="unconfirmed")
    assert pool.database.read(outbox.subscribers(T0)) == frozenset()
    pool.database.write(outbox.put_reader(POOL, Instant(T0 + 5)))
    pool.database.write(outbox.put_reader(POOL, Instant(T0 + 9)))
    assert pool.database.read(outbox.subscribers(T0)) == {POOL}
    assert not pool.database.write(destinations.confirm(1, "wrong", T0))
    assert pool.database.write(destinations.confirm(1, "code", T0))
    assert pool.database.read(outbox.subscribers(Instant(T0 + 9))) == {ADA}
    assert pool.database.write(outbox.forget_readers(Instant(T0 + 9)))
    assert pool.database.write(destinations.delete_destination(1))
    assert pool.database.read(outbox.subscribers(T0)) == frozenset()


def test_an_account_has_a_bounded_number_of_destinations(pool: Pool) -> None:
    for number in range(destinations.MOST):
        hook(pool, number)
    with pytest.raises(Conflict):
        hook(pool, 99)
