"""Time to build a payout tree, and to read its file as a claimant does.

python -m bench.payouts [--accounts N] [--json FILE]

Bound: 60 s for 100,000 accounts (issue 16).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpool.wallet import crypto, payouts, signing
from gpool.wallet.payouts import DistributorAddress, Period

BOUND_S = 60.0
T = TypeVar("T")


def timed(figures: dict[str, float], name: str, function: Callable[[], T]) -> T:
    start = time.perf_counter()
    made = function()
    figures[name] = round(time.perf_counter() - start, 3)
    return made


def measure(accounts: int) -> dict[str, float]:
    """Seconds of each step."""
    at = DistributorAddress(31337, signing.from_bytes(b"\x05" * 20))
    amounts = {
        signing.from_bytes(crypto.keccak256(number.to_bytes(8, "big"))[:20]): 5_000_000 + number
        for number in range(accounts)
    }
    period = Period("p-1", 1, bytes(32), at)
    figures: dict[str, float] = {}
    values = [payouts.leaf_value(at, signing.Address(each), n) for each, n in amounts.items()]
    tree = timed(figures, "tree_s", lambda: crypto.MerkleTree.of(values))
    timed(figures, "proofs_s", lambda: [tree.proof(value) for value in values])
    file = timed(figures, "close_s", lambda: payouts.close(period, amounts))
    data = timed(figures, "write_s", file.to_bytes)
    timed(figures, "verify_s", lambda: payouts.parse(data))
    timed(figures, "claim_s", lambda: payouts.claim_of(file, next(iter(amounts))))
    assert file.root == "0x" + tree.root.hex()
    return figures


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--accounts", type=int, default=100_000)
    asked.add_argument("--quick", action="store_true", help="10,000 accounts")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    accounts = 10_000 if options.quick else options.accounts
    figures = measure(accounts)
    print(f"{accounts} accounts; bound of the tree {BOUND_S:.0f} s\n")
    for name, seconds in figures.items():
        print(f"{name.removesuffix('_s'):>8}  {seconds:8.3f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"accounts": accounts, **figures}))
    return 0 if figures["close_s"] <= BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
