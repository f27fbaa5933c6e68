"""The pool of warm sandboxes, pure: what is kept follows demand and room, and no sandbox is ever two people's."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpool.agent.runtime.protocol import SandboxLimits
from gpool.agent.state_machine import warm_plan
from gpool.agent.state_machine.warm_plan import (
    Discard,
    Prepare,
    Stage,
    WarmKey,
    WarmPool,
    room_for_warm,
)
from gpool.core.model import GIB, Slice

SECOND = 1_000_000
MINUTE = 60 * SECOND
MB = 1 << 20


def key(name: str = "numpy", memory: int = GIB, gpus: tuple[int, ...] = ()) -> WarmKey:
    slices = tuple(Slice(index, GIB, 1000) for index in gpus)
    return WarmKey("fake", None, "3.11", (name,), slices, SandboxLimits(1000, memory))


KEYS = [key(), key("torch", 4 * GIB), key("torch", 4 * GIB, (0,)), key("small", 64 * MB)]


def kept(pool: WarmPool) -> list[str]:
    stays = [e for e in pool.entries.values() if e.stage is not Stage.LEAVING]
    return sorted(entry.key.preload[0] for entry in stays)


def prepare_all(pool: WarmPool, now: int, room: int, used: int = 100 * MB) -> None:
    """Until the pool has what it wants."""
    while orders := pool.settle(now, room):
        for order in orders:
            if isinstance(order, Prepare):
                pool.prepared(order.number, used)
            else:
                pool.gone(order.number)


def test_nothing_is_prepared_before_anybody_asked() -> None:
    assert WarmPool().settle(0, 100 * GIB) == []


def test_the_first_to_ask_gets_none_the_second_gets_what_was_prepared_meanwhile() -> None:
    pool = WarmPool()
    assert pool.ask(0, key()) is None
    (order,) = pool.settle(0, 10 * GIB)
    assert order == Prepare(1, key(), GIB)
    assert pool.ask(1, key()) is None, "one that is being prepared is not ready"
    pool.prepared(1, 100 * MB)
    assert pool.ask(2, key()) == 1
    assert pool.ask(3, key()) is None


@pytest.mark.parametrize(
    "other", [key("torch"), key(memory=2 * GIB), key(gpus=(0,)), key(gpus=(1,))]
)
def test_another_key_never_gets_it(other: WarmKey) -> None:
    pool = WarmPool()
    pool.ask(0, key())
    prepare_all(pool, 0, 10 * GIB)
    assert pool.ask(1, other) is None


def test_what_nobody_asks_for_is_given_up_after_minutes() -> None:
    pool = WarmPool()
    pool.ask(0, key())
    prepare_all(pool, 0, 10 * GIB)
    assert pool.settle(5 * MINUTE, 10 * GIB) == []
    assert pool.settle(7 * MINUTE, 10 * GIB) == [Discard(1)]
    pool.gone(1)
    assert pool.settle(7 * MINUTE, 10 * GIB) == []
    assert pool.demands == {}


def test_more_are_kept_of_what_is_asked_for_more_often() -> None:
    pool = WarmPool()
    for at in range(200):
        pool.ask(at * SECOND, key())
    pool.ask(200 * SECOND, key("torch"))
    prepare_all(pool, 200 * SECOND, 100 * GIB)
    assert kept(pool) == ["numpy"] * warm_plan.MOST_A_KEY + ["torch"]


def test_memory_is_given_up_when_a_lease_needs_it_the_least_wanted_first() -> None:
    pool = WarmPool()
    for name in ("numpy", "torch", "torch"):
        pool.ask(0, key(name))
    prepare_all(pool, 0, 10 * GIB)
    assert kept(pool) == ["numpy", "torch"]
    (order,) = pool.settle(1, 150 * MB)
    assert isinstance(order, Discard)
    assert kept(pool) == ["torch"]
    assert isinstance(pool.settle(2, 0)[0], Discard)


def test_what_leaves_holds_its_memory_until_it_is_gone() -> None:
    pool = WarmPool()
    pool.ask(0, key())
    prepare_all(pool, 0, 2 * GIB, used=GIB)
    for _ in range(5):
        pool.ask(1, key("torch"))
    (gives_way,) = pool.settle(1, GIB)
    assert gives_way == Discard(1)
    assert pool.settle(1, GIB) == [], "its memory is still in use"
    pool.gone(1)
    assert isinstance(pool.settle(1, GIB)[0], Prepare)


def test_one_that_cannot_be_prepared_is_not_tried_again_at_once() -> None:
    pool = WarmPool()
    pauses, now = [], 0
    for _ in range(3):
        pool.ask(now, key())
        (order,) = pool.settle(now, 10 * GIB)
        assert isinstance(order, Prepare)
        pool.failed(now, order.number)
        began = now
        while not pool.settle(now, 0) and not pool.settle(now, 10 * GIB):
            now += SECOND
        pool.gone(pool.last_number)
        pauses.append((now - began) // SECOND)
    assert pauses == [30, 60, 120]


def test_one_that_died_is_prepared_again() -> None:
    pool = WarmPool()
    pool.ask(0, key())
    prepare_all(pool, 0, 10 * GIB)
    pool.gone(1)
    assert pool.settle(1, 10 * GIB) == [Prepare(2, key(), 125 * MB)], "and by what it used before"


def test_room_is_half_of_what_is_idle_and_not_kept_back() -> None:
    assert room_for_warm(8 * GIB, 2 * GIB, 100 * GIB, 0) == 3 * GIB
    assert room_for_warm(8 * GIB, 8 * GIB, 100 * GIB, 0) == 0
    assert room_for_warm(8 * GIB, 9 * GIB, 100 * GIB, 0) == 0
    assert room_for_warm(8 * GIB, 0, GIB, GIB) == GIB, "what others on the machine use counts"


class Pool(RuleBasedStateMachine):
    """Whatever happens in whatever order; the keeper's side is played at random."""

    @initialize()
    def begin(self) -> None:
        self.pool = WarmPool()
        self.now = 0
        self.room = 0
        self.alive: dict[int, str] = {}  # what the keeper really has
        self.made: set[int] = set()
        self.users: dict[int, int] = {}  # sandbox -> whose it is

    @rule(us=st.integers(0, 400 * SECOND))
    def time_passes(self, us: int) -> None:
        self.now += us

    @rule(which=st.sampled_from(KEYS), user=st.integers(1, 3), times=st.integers(1, 9))
    def somebody_starts(self, which: WarmKey, user: int, times: int) -> None:
        for _ in range(times):
            number = self.pool.ask(self.now, which)
            if number is not None:
                assert number not in self.users, "never two users in one sandbox"
                assert self.alive.pop(number) == "ready", "never one that is not ready, or leaves"
                self.users[number] = user

    @rule(room=st.integers(0, 12 * GIB))
    def it_settles(self, room: int) -> None:
        self.room = room
        for order in self.pool.settle(self.now, room):
            if isinstance(order, Prepare):
                assert order.number not in self.made, "never a number twice"
                assert order.most_bytes <= order.key.limits.memory_bytes
                self.made.add(order.number)
                self.alive[order.number] = "preparing"
                assert self.pool.bytes_held <= room, "never over the room, even while others leave"
            else:
                assert self.alive[order.number] in ("preparing", "ready")
                self.alive[order.number] = "leaving"
        stays = [e for e in self.pool.entries.values() if e.stage is not Stage.LEAVING]
        assert sum(entry.bytes_held for entry in stays) <= room
        assert len(stays) <= warm_plan.MOST_ENTRIES

    @rule(part=st.floats(0.01, 1.0))
    def one_is_ready(self, part: float) -> None:
        for number, state in self.alive.items():
            if state == "preparing":
                held = self.pool.entries[number].bytes_held
                self.pool.prepared(number, int(held * part))
                self.alive[number] = "ready"
                return

    @rule()
    def one_fails(self) -> None:
        for number, state in list(self.alive.items()):
            if state == "preparing":
                del self.alive[number]
                self.pool.failed(self.now, number)
                return

    @rule(of=st.sampled_from(["leaving", "ready"]))
    def one_is_gone(self, of: str) -> None:
        for number, state in list(self.alive.items()):
            if state == of:
                del self.alive[number]
                self.pool.gone(number)
                return

    @invariant()
    def both_know_the_same(self) -> None:
        known = {number: entry.stage.value for number, entry in self.pool.entries.items()}
        assert known == self.alive
        assert sum(state == "preparing" for state in self.alive.values()) <= warm_plan.AT_ONCE
        assert len(self.pool.demands) <= warm_plan.MOST_KEYS + len(KEYS)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_stream_of_different_keys_does_not_fill_the_memory() -> None:
    pool = WarmPool()
    for at in range(3 * warm_plan.MOST_KEYS):
        pool.ask(at, key(f"m{at}"))
        pool.settle(at, 0)
    assert len(pool.demands) == warm_plan.MOST_KEYS
