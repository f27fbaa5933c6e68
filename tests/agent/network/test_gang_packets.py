"""Packets of a gang in pieces: what is joined is what was cut, and nothing odd gets through."""

from __future__ import annotations

import random
import struct

from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network.gang.datagrams import (
    MAX_PACKET_BYTES,
    MOST_PARTIAL,
    WIDTH,
    Joiner,
    Window,
    passes,
)
from gpool.core.gangs import address_of

numbers = st.one_of(st.integers(0, 20), st.integers(0, 3 * WIDTH), st.integers(0, 2**64 - 1))


@given(st.lists(numbers, max_size=60))
def test_a_number_is_never_admitted_twice_nor_when_it_is_too_old(coming: list[int]) -> None:
    window, seen = Window(), set[int]()
    for number in coming:
        expected = number not in seen and number > max(seen, default=-1) - WIDTH
        assert window.admits(number) == expected
        if expected:
            window.take(number)
            seen.add(number)


@given(st.permutations(range(40)))
def test_whatever_overtakes_is_always_admitted_once(coming: list[int]) -> None:
    window = Window()
    for number in coming:
        assert window.admits(number)
        window.take(number)
        assert not window.admits(number)


def pieces_of(packet: bytes, each: int, first: int) -> list[tuple[int, int, int, bytes]]:
    cut = [packet[at : at + each] for at in range(0, len(packet), each)]
    return [(first + index, index, len(cut) - 1, body) for index, body in enumerate(cut)]


@given(
    st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=8),
    st.integers(1, 60),
    st.randoms(),
)
def test_pieces_in_any_order_always_become_the_packets_they_were(
    packets: list[bytes], each: int, dice: random.Random
) -> None:
    first, coming = 0, []
    for packet in packets:
        made = pieces_of(packet, each, first)
        coming += made
        first += len(made)
    dice.shuffle(coming)
    joiner = Joiner()
    whole = [joiner.add(*piece) for piece in coming]
    assert sorted(b"".join(w) for w in whole if w is not None) == sorted(packets)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255), st.integers(0, 255), st.binary(max_size=9)), max_size=300))  # fmt: skip
def test_a_sender_that_contradicts_itself_never_breaks_the_joiner(
    coming: list[tuple[int, int, int, bytes]],
) -> None:
    joiner = Joiner()
    for number, index, last, body in coming:
        whole = joiner.add(number, index, last, body)
        assert whole is None or (len(whole) == last + 1 and None not in whole)
        assert len(joiner) <= MOST_PARTIAL


def test_more_than_a_packet_can_hold_is_never_kept() -> None:
    joiner = Joiner()
    for index in range(3):
        joiner.add(index, index, 9, bytes(MAX_PACKET_BYTES // 2))
    assert len(joiner) == 0


def ip_packet(source: bytes, destination: bytes, size: int, first: int = 0x45) -> bytes:
    head = struct.pack(">BBHHHBBH4s4s", first, 0, size, 0, 0, 64, 17, 0, source, destination)
    return head + bytes(max(0, size - len(head)))


addresses = st.one_of(
    st.integers(0, 3).map(lambda n: address_of(n).packed), st.binary(min_size=4, max_size=4)
)


@given(addresses, addresses, st.integers(20, 100), st.sampled_from([0x45, 0x46, 0x60, 0x40]), st.integers(-20, 20))  # fmt: skip
def test_only_whole_packets_between_the_two_addresses_ever_pass(
    source: bytes, destination: bytes, size: int, first: int, more: int
) -> None:
    ours, theirs = address_of(0).packed, address_of(1).packed
    packet = ip_packet(source, destination, size, first)
    expected = (source, destination, first, more) == (theirs, ours, 0x45, 0)
    assert passes(packet, size + more, theirs, ours) == expected


@given(st.binary(max_size=60))
def test_noise_never_passes(noise: bytes) -> None:
    ours, theirs = address_of(0).packed, address_of(1).packed
    assert not passes(noise, len(noise), theirs, ours) or noise[12:20] == theirs + ours
