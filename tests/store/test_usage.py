"""What people had lately, kept beside the tasks."""

from __future__ import annotations

from gpool.core.model import Instant
from gpool.server.store.operations import rules
from tests.store.store_pool import Pool


def test_what_was_told_is_read_back_and_told_again(pool: Pool) -> None:
    pool.write(rules.put_usage({("user", 1): 500, ("team", 1): 700, ("floor", 0): 1}, Instant(10)))
    pool.write(rules.put_usage({("user", 1): 400}, Instant(20)))
    assert pool.read(rules.usage()) == {
        ("user", 1): (400, 20),
        ("team", 1): (700, 10),
        ("floor", 0): (1, 10),
    }


def test_what_was_told_late_never_takes_the_place_of_what_is_newer(pool: Pool) -> None:
    pool.write(rules.put_usage({("user", 1): 500}, Instant(20)))
    pool.write(rules.put_usage({("user", 1): 900}, Instant(10)))
    assert pool.read(rules.usage()) == {("user", 1): (500, 20)}


def test_what_is_old_is_forgotten(pool: Pool) -> None:
    pool.write(rules.put_usage({("user", 1): 500}, Instant(10)))
    pool.write(rules.put_usage({("user", 2): 500}, Instant(20)))
    pool.write(rules.forget_usage(Instant(20)))
    assert list(pool.read(rules.usage())) == [("user", 2)]
