"""Sealed blocks: each has the Merkle root of its transfers and the hash of the block before. Pure.

Leaves and inner nodes are hashed with different prefixes (RFC 6962), and the last one of an odd level moves up, so that
no list of transfers has the root of another one. A block's hash covers its number, its root and the hash before it:
whoever keeps one hash outside the server can tell that nothing up to that block was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from gpool.core.model import Instant
from gpool.core.money.ledger import RecordedTransfer

GENESIS = "0" * 64
"""Hash before the first block."""


class SealedEntry(NamedTuple):
    """An entry as it is hashed; `kind`: of its account, whose floor depends on it."""

    account: int
    kind: str
    sequence: int
    amount: int
    balance: int


@dataclass(frozen=True, slots=True)
class BookedTransfer:
    """A transfer with all its entries, by account."""

    transfer: RecordedTransfer
    entries: tuple[SealedEntry, ...]


@dataclass(frozen=True, slots=True)
class LedgerBlock:
    number: int
    previous: str
    root: str
    transfers: int
    sealed_at: Instant
    hash: str


def leaf_of(booked: BookedTransfer) -> bytes:
    transfer = booked.transfer
    head = (transfer.id, transfer.kind, transfer.at, transfer.digest, transfer.refers_to or "")
    rows = (" ".join(map(str, entry)) for entry in booked.entries)
    text = "\n".join((*map(str, head), *rows))
    return sha256(b"\x00" + text.encode()).digest()


def merkle_root(leaves: Sequence[bytes]) -> str:
    """Root in hexadecimal; of no leaves, the hash of nothing."""
    level = list(leaves) or [sha256(b"").digest()]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        above = [sha256(b"\x01" + left + right).digest() for left, right in pairs]
        level = above + level[len(above) * 2 :]
    return level[0].hex()


def block_hash(number: int, previous: str, root: str, transfers: int, sealed_at: Instant) -> str:
    text = f"gpool ledger block\n{number}\n{previous}\n{root}\n{transfers}\n{sealed_at}"
    return sha256(text.encode()).hexdigest()


def sealed(head: LedgerBlock | None, booked: Sequence[BookedTransfer], at: Instant) -> LedgerBlock:
    """The next block after `head`, of these transfers in this order."""
    number, previous = (1, GENESIS) if head is None else (head.number + 1, head.hash)
    root = merkle_root([leaf_of(each) for each in booked])
    digest = block_hash(number, previous, root, len(booked), at)
    return LedgerBlock(number, previous, root, len(booked), at, digest)
