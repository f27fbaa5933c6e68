"""DNS messages: one question in, IPv4 addresses out. Pure; input is untrusted.

No upstream record, name or text reaches a sandbox.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

A, OPT, AAAA, IN = 1, 41, 28, 1
NO_ERROR, FORM_ERROR, SERVER_FAILURE, NO_NAME, NOT_IMPLEMENTED, REFUSED = 0, 1, 2, 3, 4, 5
HEADER = struct.Struct("!HHHHHH")
RESPONSE, TRUNCATED, WANTED, AVAILABLE = 0x8000, 0x0200, 0x0100, 0x0080
MAX_MESSAGE_BYTES = 4096
MAX_ADDRESSES = 16
MAX_TTL_S = 300
UPSTREAM_BYTES = 1232  # fits any path (DNS flag day 2020)
LONG_LABEL = 20
BITS_A_LETTER = 3.6  # random hexadecimal has 4, natural words about 3
DEAR = 8


class BadMessage(ValueError): ...


@dataclass(frozen=True, slots=True)
class Question:
    """`name` is lower case, without the trailing dot."""

    number: int
    name: str
    kind: int
    asked: bytes  # verbatim, repeated in the answer


@dataclass(frozen=True, slots=True)
class DnsAnswer:
    code: int
    addresses: tuple[IPv4Address, ...]
    ttl_s: int
    truncated: bool


def read_question(message: bytes) -> Question:
    if len(message) > MAX_MESSAGE_BYTES or len(message) < HEADER.size:
        raise BadMessage("too long or too short")
    number, flags, questions, _, _, _ = HEADER.unpack_from(message)
    if flags & (RESPONSE | 0x7800) or questions != 1:
        raise BadMessage("no single plain question")
    name, at = _name(message, HEADER.size)
    if at + 4 > len(message):
        raise BadMessage("ends in the question")
    kind, family = struct.unpack_from("!HH", message, at)
    if family != IN:
        raise BadMessage("class is not IN")
    return Question(number, name, kind, message[HEADER.size : at + 4])


def write_question(number: int, name: str) -> bytes:
    """Only the name comes from the sandbox."""
    labels = b"".join(bytes((len(part),)) + part for part in name.encode("ascii").split(b"."))
    extension = b"\0" + struct.pack("!HHIH", OPT, UPSTREAM_BYTES, 0, 0)
    head = HEADER.pack(number, WANTED, 1, 0, 0, 1)
    return head + labels + b"\0" + struct.pack("!HH", A, IN) + extension


def read_answer(message: bytes, number: int, name: str) -> DnsAnswer:
    """Every IPv4 address of the answer section, through any CNAME chain; it must answer our question."""
    if len(message) < HEADER.size:
        raise BadMessage("too short")
    said, flags, questions, answers, _, _ = HEADER.unpack_from(message)
    if said != number or not flags & RESPONSE or questions != 1:
        raise BadMessage("not the answer")
    asked, at = _name(message, HEADER.size)
    if asked != name or message[at : at + 4] != struct.pack("!HH", A, IN):
        raise BadMessage("answers another question")
    at += 4
    addresses: list[IPv4Address] = []
    ttl = MAX_TTL_S
    for _ in range(answers):
        _, at = _name(message, at)
        if at + 10 > len(message):
            raise BadMessage("ends in a record")
        kind, family, seconds, length = struct.unpack_from("!HHIH", message, at)
        at += 10
        if at + length > len(message):
            raise BadMessage("ends in a record")
        if kind == A and family == IN and length == 4 and len(addresses) < MAX_ADDRESSES:
            addresses.append(IPv4Address(message[at : at + 4]))
            ttl = min(ttl, seconds)
        at += length
    return DnsAnswer(flags & 15, tuple(dict.fromkeys(addresses)), ttl, bool(flags & TRUNCATED))


def write_answer(
    question: Question, code: int, addresses: Sequence[IPv4Address] = (), ttl_s: int = 0
) -> bytes:
    flags = RESPONSE | WANTED | AVAILABLE | code
    head = HEADER.pack(question.number, flags, 1, len(addresses), 0, 0)
    pointer = 0xC000 | HEADER.size  # to the name in the question
    records = (
        struct.pack("!HHHIH", pointer, A, IN, ttl_s, 4) + address.packed for address in addresses
    )
    return head + question.asked + b"".join(records)


def cost(name: str) -> int:
    """Letters of a query, eightfold for long random labels. Slows data carried out in names; does not prevent it."""
    return sum(
        len(label) * (DEAR if len(label) >= LONG_LABEL and _bits(label) > BITS_A_LETTER else 1)
        for label in name.split(".")
    )


def _bits(label: str) -> float:
    shares = (count / len(label) for count in Counter(label).values())
    return -sum(share * math.log2(share) for share in shares)


def _name(message: bytes, at: int) -> tuple[str, int]:
    """Return the name and the next offset. Pointers must lead backwards, so parsing ends."""
    labels: list[str] = []
    total = 0
    after = -1
    bound = at
    while True:
        if at >= len(message):
            raise BadMessage("ends in a name")
        length = message[at]
        if length & 0xC0 == 0xC0:
            if at + 2 > len(message):
                raise BadMessage("ends in a pointer")
            target = struct.unpack_from("!H", message, at)[0] & 0x3FFF
            after = at + 2 if after < 0 else after
            if target >= bound:
                raise BadMessage("a pointer that leads forwards")
            at = bound = target
            continue
        if length & 0xC0:
            raise BadMessage("an unknown kind of label")
        at += 1
        if length == 0:
            return ".".join(labels), at if after < 0 else after
        label = message[at : at + length]
        total += length + 1
        if len(label) < length or total > 254:
            raise BadMessage("a name too long")
        if not all(33 <= byte < 127 and byte != 46 for byte in label):
            raise BadMessage("letters that no host name has")
        labels.append(label.decode("ascii").lower())
        at += length
