"""Bonds between members: what one seals the other opens once, and nothing else opens anything."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network.gang.datagrams import HEAD, Bond
from gpool.agent.network.gang.relay_client import session_after

SECRET = b"s" * 32


def session(number: int) -> bytes:
    return number.to_bytes(8) + bytes(8)


def met(one: Bond, other: Bond) -> int:
    """Lets them say hello; how many datagrams that took."""
    said, count = deque([(other, one.hello(asks=True))]), 0
    while said:
        to, datagram = said.popleft()
        count += 1
        assert count < 10
        answer = to.hear(datagram)
        if answer is not None:
            said.append((one if to is other else other, answer))
    return count


def pair(secret: bytes = SECRET, other_secret: bytes = SECRET) -> tuple[Bond, Bond]:
    one, other = Bond(secret, 0, 1, session(1)), Bond(other_secret, 1, 0, session(2))
    met(one, other)
    return one, other


def sealed(bond: Bond, packet: bytes, each: int = 100) -> list[memoryview]:
    return [memoryview(b"".join(parts)) for parts in bond.seal(memoryview(packet), each)]


def opened(bond: Bond, datagrams: list[memoryview]) -> list[bytes]:
    return [b"".join(pieces) for pieces in bond.open(datagrams)]


def test_two_members_know_each_other_after_three_datagrams() -> None:
    one, other = Bond(SECRET, 0, 1, session(1)), Bond(SECRET, 1, 0, session(2))
    assert met(one, other) == 3
    assert one.is_made
    assert other.is_made
    assert met(one, other) == 2  # asked again: an answer, and no more


@given(st.lists(st.binary(min_size=1, max_size=400), max_size=6), st.integers(1, 150), st.randoms())
def test_what_one_seals_the_other_always_opens_once(
    packets: list[bytes], each: int, dice: random.Random
) -> None:
    one, other = pair()
    datagrams = [
        d for packet in packets if len(packet) <= 256 * each for d in sealed(one, packet, each)
    ]
    expected = sorted(packet for packet in packets if len(packet) <= 256 * each)
    coming = datagrams * 2
    dice.shuffle(coming)
    assert sorted(opened(other, coming)) == expected
    assert other.refused == len(datagrams)


@given(st.binary(min_size=1, max_size=60), st.integers(0), st.integers(0, 7))
def test_a_datagram_with_one_bit_changed_never_opens(packet: bytes, at: int, bit: int) -> None:
    one, other = pair()
    (datagram,) = sealed(one, packet)
    changed = bytearray(datagram)
    changed[at % len(changed)] ^= 1 << bit
    assert opened(other, [memoryview(bytes(changed))]) == []
    assert opened(other, [datagram]) == [
        packet
    ]  # the control, and nothing was remembered of the other


def test_what_comes_back_to_its_sender_never_opens() -> None:
    one, other = pair()
    datagrams = sealed(one, b"hello")
    assert opened(one, datagrams) == []
    as_theirs = [memoryview(HEAD.pack(1, 0, 0, 0) + bytes(d[HEAD.size :])) for d in datagrams]
    assert opened(one, as_theirs) == []
    assert opened(other, datagrams) == [b"hello"]


def test_another_gangs_members_never_understand_each_other() -> None:
    one, other = pair(other_secret=b"t" * 32)
    assert not one.is_made
    assert not other.is_made
    assert other.refused == 1


def test_a_third_member_never_opens_what_two_others_say() -> None:
    one, _ = pair()
    third = Bond(SECRET, 2, 0, session(3))
    met(Bond(SECRET, 0, 2, session(1)), third)
    assert third.is_made
    assert opened(third, sealed(one, b"hello")) == []


def test_a_member_started_again_is_taken_up_and_its_old_session_never_comes_back() -> None:
    one, other = pair()
    recorded = sealed(one, b"before")
    old_hello = one.hello(asks=True)
    assert opened(other, recorded) == [b"before"]
    again = Bond(SECRET, 0, 1, session(9))
    met(again, other)
    assert opened(other, sealed(again, b"after")) == [b"after"]
    assert opened(other, recorded) == []
    assert other.hear(old_hello) is None
    assert opened(other, sealed(again, b"still")) == [b"still"]


def test_what_was_recorded_before_the_receiver_began_again_never_opens() -> None:
    one, other = pair()
    recorded, hellos = sealed(one, b"old"), [one.hello(asks=True), one.hello(asks=False)]
    fresh = Bond(SECRET, 1, 0, session(5))
    for hello in hellos:
        fresh.hear(hello)
    assert not fresh.is_made  # a recording does not know the new session
    assert opened(fresh, recorded) == []
    assert opened(other, recorded) == [b"old"]  # the control
    met(fresh, one)
    assert opened(fresh, recorded) == []
    assert opened(fresh, sealed(one, b"new")) == [b"new"]


def test_a_session_withheld_until_the_next_was_taken_never_counts() -> None:
    for in_time in (True, False):
        _, other = pair()
        between = Bond(SECRET, 0, 1, session(3))
        answer = other.hear(between.hello(asks=True))
        assert answer is not None
        withheld = between.hear(answer)  # repeats the other's session, as it should
        assert withheld is not None
        again = Bond(SECRET, 0, 1, session(9))
        if in_time:  # the control
            other.hear(withheld)
            assert opened(other, sealed(between, b"between")) == [b"between"]
        met(again, other)
        other.hear(withheld)
        assert opened(other, sealed(between, b"late")) == []
        assert opened(other, sealed(again, b"still")) == [b"still"]


@given(st.data())
def test_members_that_begin_again_at_any_time_never_use_a_nonce_twice(data: st.DataObject) -> None:
    """With all hellos delivered or lost, doubled or late, as chance will have it."""
    now = 1
    ends = [Bond(SECRET, 0, 1, session(1)), Bond(SECRET, 1, 0, session(2))]
    on_the_way: list[tuple[int, bytes]] = []
    used: set[bytes] = set()
    for step in data.draw(st.lists(st.sampled_from(["ask", "hear", "again", "send"]), max_size=40)):
        at = data.draw(st.integers(0, 1))
        if step == "ask":
            on_the_way.append((1 - at, ends[at].hello(asks=True)))
        elif step == "again":
            now += 10
            ends[at] = Bond(SECRET, at, 1 - at, session(now + at))
        elif step == "hear" and on_the_way:
            to, said = data.draw(st.sampled_from(on_the_way))
            answer = ends[to].hear(said)
            if answer is not None:
                on_the_way.append((1 - to, answer))
        elif step == "send" and ends[at].is_made:
            (datagram,) = sealed(ends[at], b"the same words")
            assert bytes(datagram) not in used  # one key and one nonce would give one text
            used.add(bytes(datagram))
    met(ends[0], ends[1])
    assert opened(ends[1], sealed(ends[0], b"in the end")) == [b"in the end"]


@given(st.binary(max_size=80))
def test_noise_never_makes_a_bond(noise: bytes) -> None:
    one = Bond(SECRET, 0, 1, session(1))
    assert one.hear(noise) is None
    assert opened(one, [memoryview(noise)]) == []
    assert not one.is_made
    assert one.refused == 2


@given(st.lists(st.integers(0, 2**63), max_size=20))
def test_a_relay_s_next_session_is_always_later(clocks: list[int]) -> None:
    last = b""
    for clock in clocks:
        last = max(last, clock.to_bytes(8) + bytes(8))  # as if the clock had been there
        following = session_after(last)
        assert following > last
        assert len(following) == 16
        last = following
