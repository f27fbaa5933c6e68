"""EIP-1271: the question as the ABI spells it, and an answer that means yes in one way only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import signing
from gpool.wallet.crypto import keccak256
from gpool.wallet.errors import BadSignature

YES = bytes.fromhex("1626ba7e") + bytes(28)


def test_the_magic_value_is_the_selector() -> None:
    assert keccak256(b"isValidSignature(bytes32,bytes)")[:4] == signing.MAGIC


def test_the_call_is_laid_out_in_words() -> None:
    data = signing.call_data(b"\x11" * 32, b"\x22" * 65)
    assert data == (
        signing.MAGIC
        + b"\x11" * 32
        + bytes(31)
        + b"\x40"
        + bytes(31)
        + b"\x41"
        + b"\x22" * 65
        + bytes(31)
    )
    assert signing.call_data(bytes(32), b"")[68:] == bytes(32)


def test_one_word_with_the_magic_value_means_yes() -> None:
    assert signing.says_yes(YES)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        signing.MAGIC,
        YES[:-1],
        YES + b"\0",
        YES + YES,
        bytes(28) + signing.MAGIC,
        YES[:-1] + b"\1",
        bytes(32),
        bytes(31) + b"\1",
        b"\xff" * 32,
        bytes.fromhex("20c13b0b") + bytes(28),
    ],
)
def test_every_other_answer_means_no(answer: bytes) -> None:
    assert not signing.says_yes(answer)


@given(st.binary(max_size=100))
def test_no_other_answer_ever_means_yes(answer: bytes) -> None:
    assert signing.says_yes(answer) == (answer == YES)


def test_a_reader_of_four_bytes_would_have_said_yes() -> None:
    dirty = signing.MAGIC + b"\1" * 60
    assert dirty.startswith(signing.MAGIC)
    assert not signing.says_yes(dirty)


def test_a_contracts_signature_may_be_of_any_length_up_to_the_limit() -> None:
    assert signing.parse_signature("0x") == b""
    assert signing.parse_signature("0x" + "ab" * 200) == b"\xab" * 200
    for text in ("", "00", "0x0", "0xAB", "0x\n", "0x0g", "0x" + "00" * 8193):
        with pytest.raises(BadSignature):
            signing.parse_signature(text)
    with pytest.raises(BadSignature):
        signing.call_data(bytes(32), bytes(8193))
    with pytest.raises(BadSignature):
        signing.call_data(bytes(31), b"")
