"""Receipts of an invented pool, for the tests of receipts, payouts and their verbs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpool.wallet.receipt_keys import KeyHistory, ReceiptKey
from gpool.wallet.receipt_work import ReceiptGpu, ReceiptWork, SignedWork
from gpool.wallet.receipts import (
    Receipt,
    ReceiptCharge,
    issue,
)

POOL = "p-0000000000001"
START_MS = 1_800_000_000_000


def receipt_key(name: str) -> ReceiptKey:
    return ReceiptKey(hashlib.sha256(name.encode()).digest())


def node_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def work(**fields: object) -> ReceiptWork:
    known: dict[str, object] = {
        "pool": POOL,
        "task": "t-0000000000007",
        "attempt": 3,
        "node": "n-000000000000a",
        "gpus": (ReceiptGpu("g-0000000000001", "NVIDIA H200 – “Größe”", "exclusive"),),
        "result_sha256": hashlib.sha256(b"42").hexdigest(),
    }
    return ReceiptWork(**(known | fields))  # type: ignore[arg-type]


def charge(**fields: object) -> ReceiptCharge:
    known: dict[str, object] = {
        "payer": "u-0000000000002",
        "owner": "u-0000000000003",
        "transfer": "x-0000000000009",
        "end_reason": "finished",
        "started_ms": START_MS + 1000,
        "ended_ms": START_MS + 3_601_000,
        "charged_ms": 3_600_000,
        "price_per_hour": 2_500_000,
        "amount": 2_500_000,
        "fee": 25_000,
        "issued_ms": START_MS + 3_602_000,
    }
    return ReceiptCharge(**(known | fields))  # type: ignore[arg-type]


def signed_work(done: ReceiptWork | None = None, name: str = "node") -> SignedWork:
    key = node_key(name)
    return SignedWork.by(key.public_key().public_bytes_raw(), key.sign, done or work())


@dataclass
class SamplePool:
    """Receipt keys of a pool over time: `first` is the current one until `rotate`."""

    key: ReceiptKey = field(default_factory=lambda: receipt_key("first"))
    history: KeyHistory = field(init=False)

    def __post_init__(self) -> None:
        self.history = KeyHistory.starting(POOL, self.key, START_MS)

    def receipt(self, signed: SignedWork | None = None, **charged: object) -> Receipt:
        return issue(signed or signed_work(), charge(**charged), self.key)

    def rotate(self, name: str, from_ms: int) -> None:
        new = receipt_key(name)
        self.history = self.history.rotated(self.key, new, from_ms)
        self.key = new
