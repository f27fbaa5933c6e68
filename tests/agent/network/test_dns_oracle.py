"""DNS messages against dnspython: both read and write the same questions and answers."""

from __future__ import annotations

import string
from ipaddress import IPv4Address

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.network.dns_messages import (
    A,
    BadMessage,
    read_answer,
    read_question,
    write_answer,
    write_question,
)

LETTERS = string.ascii_lowercase + string.digits + "-_"
LABELS = st.text(LETTERS, min_size=1, max_size=63)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join).filter(lambda name: len(name) < 250)
ADDRESSES = st.lists(
    st.integers(0, 2**32 - 1).map(IPv4Address), min_size=0, max_size=8, unique=True
)
NUMBERS = st.integers(0, 65535)


@given(NUMBERS, NAMES)
def test_dnspython_reads_our_question(number: int, name: str) -> None:
    read = dns.message.from_wire(write_question(number, name))
    assert read.id == number
    assert [(str(one.name), one.rdtype) for one in read.question] == [(name + ".", A)]
    assert read.flags == dns.flags.RD


@given(NUMBERS, NAMES, st.sampled_from(["A", "AAAA", "TXT", "MX"]), st.booleans())
def test_we_read_a_question_of_dnspython(number: int, name: str, kind: str, edns: bool) -> None:
    asked = dns.message.make_query(name.upper(), kind, use_edns=edns, id=number)
    read = read_question(asked.to_wire())
    assert (read.number, read.name, read.kind) == (number, name, dns.rdatatype.from_text(kind))


@given(NUMBERS, NAMES, ADDRESSES, st.integers(0, 300))
def test_dnspython_reads_our_answer(
    number: int, name: str, addresses: list[IPv4Address], ttl: int
) -> None:
    question = read_question(dns.message.make_query(name, "A", id=number).to_wire())
    read = dns.message.from_wire(write_answer(question, 0, addresses, ttl))
    assert (read.id, read.rcode()) == (number, 0)
    found = {IPv4Address(str(item)) for rrset in read.answer for item in rrset}
    assert found == set(addresses)
    assert all(rrset.ttl == ttl and str(rrset.name) == name + "." for rrset in read.answer)


@given(NUMBERS, NAMES, NAMES, ADDRESSES, st.integers(0, 2**31 - 1))
def test_we_read_an_answer_of_dnspython_through_an_alias(
    number: int, name: str, alias: str, addresses: list[IPv4Address], ttl: int
) -> None:
    reply = dns.message.make_response(dns.message.make_query(name, "A", id=number))
    reply.answer.append(dns.rrset.from_text(name + ".", 60, "IN", "CNAME", alias + "."))
    if addresses:
        texts = [str(address) for address in addresses]
        reply.answer.append(dns.rrset.from_text(alias + ".", ttl, "IN", "A", *texts))
    read = read_answer(reply.to_wire(), number, name)
    assert set(read.addresses) == set(addresses)
    assert read.ttl_s <= max(ttl, 300)
    assert not read.truncated


@given(st.binary(max_size=200))
def test_bytes_that_dnspython_refuses_as_a_question_never_raise_another_error(data: bytes) -> None:
    try:
        ours = read_question(data)
    except BadMessage:
        return
    try:
        theirs = dns.message.from_wire(data, ignore_trailing=True, question_only=True)
    except dns.exception.DNSException:
        pytest.fail(f"dnspython refuses {data!r}, we read {ours}")
    assert str(theirs.question[0].name).rstrip(".").lower() == ours.name
