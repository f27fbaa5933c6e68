"""Messages of strangers never do more than be refused, and nothing of theirs but addresses passes."""

from __future__ import annotations

import string
import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network import dns_messages

LABELS = st.text(string.ascii_lowercase + string.digits + "-_", min_size=1, max_size=20)
NAMES = st.lists(LABELS, min_size=1, max_size=6).map(".".join)


def asked(name: str, kind: int = dns_messages.A, number: int = 7) -> bytes:
    labels = b"".join(bytes((len(p),)) + p.encode() for p in name.split("."))
    return (
        dns_messages.HEADER.pack(number, dns_messages.WANTED, 1, 0, 0, 0)
        + labels
        + b"\0"
        + struct.pack("!HH", kind, dns_messages.IN)
    )


@given(NAMES, st.integers(0, 65535))
def test_a_question_is_read_as_it_was_asked(name: str, number: int) -> None:
    question = dns_messages.read_question(asked(name.upper(), number=number))
    assert (question.number, question.name, question.kind) == (number, name, dns_messages.A)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_question_or_refused(message: bytes) -> None:
    try:
        dns_messages.read_question(message)
    except dns_messages.BadMessage:
        return


@given(st.binary(max_size=300))
def test_any_bytes_are_an_answer_or_refused(tail: bytes) -> None:
    head = dns_messages.HEADER.pack(7, dns_messages.RESPONSE, 1, 3, 0, 0) + asked("a.example")[12:]
    for message in (tail, head + tail):
        try:
            answer = dns_messages.read_answer(message, 7, "a.example")
        except dns_messages.BadMessage:
            continue
        assert len(answer.addresses) <= dns_messages.MAX_ADDRESSES


@given(NAMES, st.lists(st.ip_addresses(v=4), max_size=16, unique=True), st.integers(0, 300))
def test_what_we_answer_is_read_back_the_same(
    name: str, addresses: list[IPv4Address], ttl_s: int
) -> None:
    question = dns_messages.read_question(asked(name))
    answer = dns_messages.read_answer(
        dns_messages.write_answer(question, dns_messages.NO_ERROR, addresses, ttl_s),
        question.number,
        name,
    )
    assert answer.addresses == tuple(addresses)


@given(NAMES)
def test_what_goes_upstream_is_a_question_for_that_name(name: str) -> None:
    assert dns_messages.read_question(dns_messages.write_question(9, name)).name == name


def test_an_answer_to_another_question_is_refused() -> None:
    question = dns_messages.read_question(asked("a.example"))
    message = dns_messages.write_answer(question, dns_messages.NO_ERROR, [IPv4Address("1.2.3.4")])
    for number, name in ((8, "a.example"), (7, "b.example")):
        with pytest.raises(dns_messages.BadMessage):
            dns_messages.read_answer(message, number, name)


def test_addresses_behind_other_names_are_found_and_other_records_are_not_passed() -> None:
    alias = b"\xc0\x0c" + struct.pack("!HHIH", 5, dns_messages.IN, 60, 4) + b"\x01b\xc0\x0e"
    text = b"\xc0\x0c" + struct.pack("!HHIH", 16, dns_messages.IN, 60, 5) + b"\x04data"
    found = (
        b"\xc0\x0c"
        + struct.pack("!HHIH", dns_messages.A, dns_messages.IN, 30, 4)
        + bytes((1, 2, 3, 4))
    )
    message = (
        dns_messages.HEADER.pack(7, dns_messages.RESPONSE, 1, 3, 0, 0) + asked("a.example")[12:]
    )
    answer = dns_messages.read_answer(message + alias + text + found, 7, "a.example")
    assert (answer.addresses, answer.ttl_s) == ((IPv4Address("1.2.3.4"),), 30)


def test_a_pointer_that_leads_in_circles_is_refused() -> None:
    circle = (
        dns_messages.HEADER.pack(7, dns_messages.WANTED, 1, 0, 0, 0)
        + b"\xc0\x0c"
        + struct.pack("!HH", 1, 1)
    )
    with pytest.raises(dns_messages.BadMessage):
        dns_messages.read_question(circle)


@given(NAMES)
def test_no_name_is_free(name: str) -> None:
    assert dns_messages.cost(name) >= len(name.replace(".", ""))


def test_names_that_look_like_data_are_dear() -> None:
    data = "mzxw6ytboi4dkmrrgq2tmnzyha3tqojq" + ".t.example"
    people = "files.of-packages.example"
    assert dns_messages.cost(data) > 5 * dns_messages.cost(people)
