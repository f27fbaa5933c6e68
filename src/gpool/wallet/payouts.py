"""Payouts of a period: a file of cumulative amounts per account, and its Merkle tree for the distributor contract.

Amounts are cumulative, in micro-credits (base units of the token), since the first period. So an account that skips
a period loses nothing, a tree that is published twice pays once, and a claim needs the newest tree only:

    period 1   alice 500             claim pays 500
    period 2   alice 800             claim pays 300, or 800 if alice did not claim before

A pool without a chain has no tree: its file says what is due, as JSON and as CSV. No I/O.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from gpool.wallet import canonical_json, signing
from gpool.wallet.crypto import MerkleTree, keccak256
from gpool.wallet.errors import BadAddress, BadDocument, BadPayout, shown
from gpool.wallet.receipt_keys import VERSION, OpaqueId
from gpool.wallet.signing import Address

MAX_BYTES = 256 * 1024 * 1024
MAX_AMOUNT = (1 << 96) - 1
"""Per account; the sum over every account still has at most 39 digits."""
COLUMNS = ("account", "cumulative", "due")
_DIGITS = re.compile(r"0|[1-9][0-9]{0,38}")
_OPAQUE = re.compile(r"[a-z0-9][a-z0-9:_.-]{0,79}")
NO_ROOT = "0x" + "00" * 32

HashHex = Annotated[str, Meta(pattern=r"^0x[0-9a-f]{64}\Z")]
Decimal = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,38})\Z")]
"""Amounts are text: no JSON parser rounds them."""


class DistributorAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contract that pays: part of every leaf, so that no proof is valid at another contract or chain."""

    chain_id: Annotated[int, Meta(ge=1, le=canonical_json.LARGEST_INTEGER)]
    contract: str


class PayoutLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    account: str
    """Wallet address; in a pool without a chain also an opaque id."""
    cumulative: Decimal
    due: Decimal
    """Part of the amount that the period before did not have."""


class PayoutFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pool: OpaqueId
    period: Annotated[int, Meta(ge=1, le=canonical_json.LARGEST_INTEGER)]
    lines: tuple[PayoutLine, ...]
    """Sorted by account."""
    total_due: Decimal
    total_cumulative: Decimal
    receipts_root: HashHex
    previous_sha3: HashHex
    """Keccak-256 of the file of the period before; zeros in the first period."""
    distributor: DistributorAddress | None = None
    root: HashHex | None = None
    """Root of the tree; only with a distributor."""

    def to_bytes(self) -> bytes:
        return canonical_json.encode(msgspec.to_builtins(self) | {"version": VERSION})

    def cumulative(self) -> dict[str, int]:
        return {line.account: int(line.cumulative) for line in self.lines}

    def to_csv(self) -> str:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows((line.account, line.cumulative, line.due) for line in self.lines)
        return text.getvalue()


@dataclass(frozen=True, slots=True)
class Period:
    """Everything of a payout file but its amounts."""

    pool: str
    number: int
    receipts_root: bytes
    distributor: DistributorAddress | None = None


@dataclass(frozen=True, slots=True)
class PayoutClaim:
    """One account's claim, complete with the proof that the contract checks."""

    distributor: DistributorAddress
    account: Address
    cumulative: int
    proof: tuple[bytes, ...]


def leaf_value(at: DistributorAddress, account: Address, cumulative: int) -> bytes:
    """ABI encoding of (chain id, contract, account, cumulative amount): what a leaf hashes twice."""
    words = (
        at.chain_id.to_bytes(32, "big"),
        bytes.fromhex(at.contract[2:]).rjust(32, b"\0"),
        bytes.fromhex(account[2:]).rjust(32, b"\0"),
        cumulative.to_bytes(32, "big"),
    )
    return b"".join(words)


def close(
    period: Period, cumulative: Mapping[str, int], previous: PayoutFile | None = None
) -> PayoutFile:
    """Build the file of a period. `BadPayout` if an amount is below that of the period before.

    Accounts that only the period before has are kept with their amount.
    """
    before = {} if previous is None else previous.cumulative()
    _check_order(period, previous)
    amounts = before | dict(cumulative)
    lines = []
    for account in sorted(amounts):
        _check_account(account, period.distributor)
        amount, paid = amounts[account], before.get(account, 0)
        if not paid <= amount <= MAX_AMOUNT:
            raise BadPayout(
                f"{account} has {amount}, and had {paid} in the period before: cumulative amounts never fall"
            )
        lines.append(PayoutLine(account, str(amount), str(amount - paid)))
    if not lines:
        raise BadPayout("a payout needs at least one account")
    root = None
    if period.distributor is not None:
        root = "0x" + _tree(period.distributor, lines).root.hex()
    return PayoutFile(
        pool=period.pool,
        period=period.number,
        lines=tuple(lines),
        total_due=str(sum(int(line.due) for line in lines)),
        total_cumulative=str(sum(amounts.values())),
        receipts_root="0x" + period.receipts_root.hex(),
        previous_sha3=NO_ROOT if previous is None else "0x" + keccak256(previous.to_bytes()).hex(),
        distributor=period.distributor,
        root=root,
    )


def parse(data: bytes) -> PayoutFile:
    """Read a payout file and recompute totals and root; `BadPayout` if anything does not add up."""
    if len(data) > MAX_BYTES:
        raise BadPayout(f"a payout file has at most {MAX_BYTES} bytes, not {len(data)}")
    try:
        fields = canonical_json.decode(data)
        if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
            raise BadPayout(f"not a payout file of version {VERSION}")
        found = msgspec.convert(fields, PayoutFile)
    except (BadDocument, msgspec.ValidationError) as exc:
        raise BadPayout(f"not a payout file: {exc}") from exc
    _check(found)
    return found


def _check(file: PayoutFile) -> None:
    accounts = [line.account for line in file.lines]
    if accounts != sorted(set(accounts)) or not accounts:
        raise BadPayout("the accounts are not in order, or one occurs twice")
    if file.distributor is not None:
        _check_address(file.distributor.contract)
    for line in file.lines:
        _check_account(line.account, file.distributor)
        if not int(line.due) <= int(line.cumulative) <= MAX_AMOUNT:
            raise BadPayout(f"{line.account} is due more than its cumulative amount")
    totals = (
        (file.total_due, sum(int(line.due) for line in file.lines)),
        (file.total_cumulative, sum(int(line.cumulative) for line in file.lines)),
    )
    for stated, computed in totals:
        if int(stated) != computed:
            raise BadPayout(f"the file states a total of {stated}; its lines add up to {computed}")
    if (file.root is None) != (file.distributor is None):
        raise BadPayout("a payout file has a root exactly if it names a distributor")
    if file.distributor is not None:
        root = "0x" + _tree(file.distributor, file.lines).root.hex()
        if root != file.root:
            raise BadPayout(f"the file states the root {file.root}; its lines give {root}")


def check_successor(file: PayoutFile, previous: PayoutFile) -> None:
    """`BadPayout` unless the file is what `close` makes of its amounts after the period before."""
    period = Period(file.pool, file.period, bytes.fromhex(file.receipts_root[2:]), file.distributor)
    if close(period, file.cumulative(), previous) != file:
        raise BadPayout(
            f"the payout of period {file.period} does not follow from period {previous.period}: "
            "accounts, amounts due or the hash of the period before differ"
        )


def claim_of(file: PayoutFile, account: str) -> PayoutClaim:
    """Claim with proof; `BadPayout` if the file has no distributor or no such account."""
    return next(iter(claims_of(file, (account,))))


def claims_of(file: PayoutFile, accounts: Iterable[str]) -> Iterable[PayoutClaim]:
    """Claims of several accounts from one tree."""
    if file.distributor is None:
        raise BadPayout("this payout file names no contract: the pool pays by other means")
    amounts = file.cumulative()
    tree = _tree(file.distributor, file.lines)
    for account in accounts:
        address = signing.from_bytes(bytes.fromhex(_hex_of(account)))
        amount = amounts.get(address)
        if amount is None:
            raise BadPayout(f"{address} has no amount in period {file.period}")
        proof = tree.proof(leaf_value(file.distributor, address, amount))
        yield PayoutClaim(file.distributor, address, amount, proof)


def amounts_from_csv(text: str) -> dict[str, int]:
    """Cumulative amounts from CSV with the columns `account` and `cumulative`; others are ignored."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    wanted = COLUMNS[:2]
    if rows.fieldnames is None or any(rows.fieldnames.count(name) != 1 for name in wanted):
        raise BadPayout(f"the first line must name the columns {','.join(wanted)}")
    found: dict[str, int] = {}
    for row in rows:
        account, amount = (row[name] or "" for name in wanted)
        if not _DIGITS.fullmatch(amount):
            raise BadPayout(
                f"line {rows.line_num}: {shown(amount)} is not an amount; write micro-credits as digits"
            )
        if account in found:
            raise BadPayout(f"line {rows.line_num}: {shown(account)} occurs twice")
        found[account] = int(amount)
    return found


def _tree(at: DistributorAddress, lines: Iterable[PayoutLine]) -> MerkleTree:
    return MerkleTree.of(
        leaf_value(at, Address(line.account), int(line.cumulative)) for line in lines
    )


def _check_order(period: Period, previous: PayoutFile | None) -> None:
    if period.distributor is not None:
        _check_address(period.distributor.contract)
    if previous is None:
        return
    if (period.pool, period.distributor) != (previous.pool, previous.distributor):
        raise BadPayout("the period before is of another pool or another contract")
    if period.number <= previous.period:
        raise BadPayout(f"period {period.number} does not follow period {previous.period}")


def _check_account(account: str, distributor: DistributorAddress | None) -> None:
    if distributor is not None or account.startswith("0x"):
        _check_address(account)
    elif not _OPAQUE.fullmatch(account):
        raise BadPayout(f"{shown(account)} is neither an address nor an id of an account")


def _check_address(text: str) -> None:
    try:
        signing.parse(text)
    except BadAddress as exc:
        raise BadPayout(exc.detail) from exc


def _hex_of(account: str) -> str:
    """Hex digits of an address in any spelling, as people paste it."""
    found = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{40})", account)
    if found is None:
        raise BadPayout(f"{shown(account)} is not an address; one is 0x and 40 hex digits")
    return found[1]
