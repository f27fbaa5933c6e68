"""The audit record: numbers without gaps and an unbroken chain, whoever appends at once."""

from __future__ import annotations

from dataclasses import replace

from gpool.core.model import Instant
from gpool.server.identity.audit import (
    AuditAnchor,
    AuditEntry,
    ChainBroken,
    ChainIntact,
    check,
    facts,
)
from gpool.server.store.operations.identity import accounts, audit
from gpool.server.store.protocol import Operation, Statement, operation
from tests.store.store_pool import Database, Pool, race


def entry(number: int = 0, **changed: object) -> AuditEntry:
    made = AuditEntry(0, Instant(number), "u-1", "sign_in", "s-1", "allowed", "127.0.0.1")
    return replace(made, **changed)


def test_entries_are_numbered_linked_and_read_back(pool: Pool) -> None:
    assert pool.read(audit.head()) is None
    assert pool.write(audit.append([])) == 0
    told = facts({"name": "ann", "a": 'x"ü'})
    assert pool.write(audit.append([entry(1, facts=told), entry(2)])) == 2
    assert pool.write(audit.append([entry(3)])) == 3
    assert pool.write(audit.append([])) == 3
    links = pool.read(audit.entries(0, 10))
    assert [link.entry.sequence for link in links] == [1, 2, 3]
    assert links[0].entry == entry(1, sequence=1, facts=told)
    assert (
        check(links)
        == ChainIntact(pool.read(audit.head()))
        == ChainIntact(AuditAnchor(3, links[-1].hash))
    )
    assert pool.read(audit.entries(1, 1)) == links[1:2]
    assert pool.read(audit.newest(None, 2)) == (links[2], links[1])
    assert pool.read(audit.newest(2, 9)) == (links[0],)


def test_what_no_database_can_hold_is_hashed_as_it_is_stored(pool: Pool) -> None:
    odd = entry(1, actor="a\0b", thing="half \ud800", facts=(("k\0", "\udfff"),))
    pool.write(audit.append([odd]))
    links = pool.read(audit.entries(0, 10))
    assert isinstance(check(links), ChainIntact)
    assert links[0].entry.actor == "a\ufffdb"


def test_many_writers_at_once_leave_no_gap_and_one_chain(pool: Pool, database: Database) -> None:
    appended = [audit.append([entry(i), entry(i + 1000)]) for i in range(60)]
    numbers = race(database, appended)
    assert sorted(numbers) == list(range(2, 121, 2))
    links = pool.read(audit.entries(0, 1000))
    assert len(links) == 120
    assert check(links) == ChainIntact(pool.read(audit.head()))


def test_a_refused_operation_takes_no_number(pool: Pool, database: Database) -> None:
    pool.account("bob", wallet="0xbb")

    @operation
    def linked(number: int) -> Operation[int]:
        yield from accounts.link_wallet(
            pool.ann, "0xbb" if number % 2 else f"0x{number}", Instant(1)
        )
        return (yield from audit.append_all([entry(number)]))

    answers = race(database, [linked(number) for number in range(20)])
    assert sorted(answer for answer in answers if isinstance(answer, int)) == list(range(1, 11))
    assert isinstance(check(pool.read(audit.entries(0, 100))), ChainIntact)


def test_a_changed_or_missing_entry_shows(pool: Pool) -> None:
    pool.write(audit.append([entry(i) for i in range(5)]))

    @operation
    def forge() -> Operation[None]:
        yield Statement("UPDATE audit SET actor = 'u-2' WHERE number = 3")

    pool.write(forge())
    found = check(pool.read(audit.entries(0, 10)))
    assert isinstance(found, ChainBroken)
    assert found.sequence == 3
