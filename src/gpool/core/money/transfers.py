"""Values of the ledger: accounts, transfer requests with ids that their caller chooses, outcomes. Pure.

Amounts are integers in micro-credits. A request checks its own form when it is made (`Invalid`); whether it is possible
is decided by `ledger.apply`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import NewType, assert_never

from gpool.core.errors import Invalid
from gpool.core.model import Instant
from gpool.core.specs.fields import format_price, parse_price

LedgerAccountId = NewType("LedgerAccountId", int)
TransferId = NewType("TransferId", str)
"""Chosen by the caller: the same id twice moves once. Opaque: it must not contain names of people."""

MAX_AMOUNT = 10**15
"""Micro-credits of one posting: a milliard credits."""

LEAST_BALANCE = -4 * 10**18
"""Floor of the treasury, which issues credits. The sum of all other balances stays below 2^63 with it."""

MAX_ID_LENGTH = 100
_ID = re.compile(rf"[a-z0-9][a-z0-9:._-]{{0,{MAX_ID_LENGTH - 1}}}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AccountKind(StrEnum):
    USER = "user"  # funds of a person
    TEAM = "team"
    PENDING = "pending"  # funds set aside by one user or team
    OWNER = "owner"  # vested earnings of a person's nodes
    VESTING = "vesting"  # earnings that can still be forfeited
    PAID = "paid"  # earnings that left the books by a payout
    FEE = "fee"  # the pool's fees
    TREASURY = "treasury"  # issues credits: its balance is what all others have, negated


TREASURY, FEE = LedgerAccountId(1), LedgerAccountId(2)
"""The two accounts of the pool itself."""


def floor_of(kind: AccountKind) -> int:
    """Smallest balance of an account of this kind."""
    return LEAST_BALANCE if kind is AccountKind.TREASURY else 0


class TransferKind(StrEnum):
    GRANT = "grant"
    REFUND = "refund"
    RESERVE = "reserve"
    POST = "post"
    VOID = "void"
    EXPIRE = "expire"
    VEST = "vest"
    FORFEIT = "forfeit"
    PAYOUT = "payout"


RESOLUTIONS = frozenset({TransferKind.POST, TransferKind.VOID, TransferKind.EXPIRE})


class TransferOutcome(StrEnum):
    """Result of one request; all but the first two mean that nothing moved."""

    MOVED = "moved"
    REPEATED = "repeated"  # moved earlier under the same id
    ID_REUSED = "id_reused"  # the id belongs to a transfer with other content
    NO_ACCOUNT = "no_account"
    NO_FUNDS = "no_funds"  # a balance would fall below its floor
    OVER_BUDGET = "over_budget"
    NO_PENDING = "no_pending"
    RESOLVED = "resolved"  # the pending transfer was posted, voided or expired before
    NOT_DUE = "not_due"  # the pending transfer expires later
    TOO_MUCH = "too_much"  # more than was set aside, or than is left of the charge
    NO_CHARGE = "no_charge"  # a refund or forfeit that names no posted charge

    @property
    def is_done(self) -> bool:
        return self in (TransferOutcome.MOVED, TransferOutcome.REPEATED)


@dataclass(frozen=True, slots=True)
class Posting:
    account: LedgerAccountId
    amount: int

    def __post_init__(self) -> None:
        checked_amount(self.amount)


@dataclass(frozen=True, slots=True)
class Grant:
    """Credits from the treasury to an account."""

    id: TransferId
    to: LedgerAccountId
    amount: int

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_amount(self.amount)
        if self.to == TREASURY:
            raise Invalid("a grant goes to another account than the treasury, which issues it")


@dataclass(frozen=True, slots=True)
class Refund:
    """Part or all of a charge (the id of a `Post`), from the treasury to its payer."""

    id: TransferId
    charge: TransferId
    amount: int

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_id(self.charge)
        checked_amount(self.amount)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Pending transfer: set funds of `payer` aside in its account `pending`, until resolved or expired.

    `is_counted`: the funds were set aside before, under another id, and the budget has allowed them then.
    """

    id: TransferId
    payer: LedgerAccountId
    pending: LedgerAccountId
    amount: int
    expires_at: Instant
    is_counted: bool = False

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_amount(self.amount)
        if self.payer == self.pending:
            raise Invalid("funds are set aside in another account than the payer's own")


@dataclass(frozen=True, slots=True)
class Post:
    """Resolve a pending transfer: pay the postings from it and return what is left to the payer."""

    id: TransferId
    pending: TransferId
    postings: tuple[Posting, ...]

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_id(self.pending)
        accounts = {each.account for each in self.postings}
        if not self.postings or len(accounts) != len(self.postings):
            raise Invalid("a charge has one posting or more, each to another account")


@dataclass(frozen=True, slots=True)
class Void:
    """Resolve a pending transfer without a charge: all of it returns to the payer."""

    id: TransferId
    pending: TransferId

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_id(self.pending)


@dataclass(frozen=True, slots=True)
class Expire:
    """Resolve a pending transfer whose time is over."""

    id: TransferId
    pending: TransferId

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_id(self.pending)


@dataclass(frozen=True, slots=True)
class Vest:
    """Earnings of an owner whose time to be forfeited is over, from the vesting account to the owner's account."""

    id: TransferId
    vesting: LedgerAccountId
    owner: LedgerAccountId
    amount: int

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_amount(self.amount)
        if self.vesting == self.owner:
            raise Invalid("earnings vest from another account than the owner's")


@dataclass(frozen=True, slots=True)
class Forfeit:
    """Part or all of a charge (the id of a `Post`) that its owner loses: `share` of the vesting account and `fee` return.

    The payer gets what earlier refunds of the charge left; the treasury, which paid those, gets the rest.
    """

    id: TransferId
    charge: TransferId
    vesting: LedgerAccountId
    share: int
    fee: int

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_id(self.charge)
        checked_amount(self.share)
        if self.fee:
            checked_amount(self.fee)


@dataclass(frozen=True, slots=True)
class Payout:
    """Earnings that are paid outside the books, from the owner's account to the account of paid earnings."""

    id: TransferId
    owner: LedgerAccountId
    paid: LedgerAccountId
    amount: int

    def __post_init__(self) -> None:
        checked_id(self.id)
        checked_amount(self.amount)
        if self.owner == self.paid:
            raise Invalid("a payout goes to another account than the owner's")


TransferRequest = Grant | Refund | Reserve | Post | Void | Expire | Vest | Forfeit | Payout


def kind_of(request: TransferRequest) -> TransferKind:
    return TransferKind(type(request).__name__.lower())


def refers_to(request: TransferRequest) -> TransferId | None:
    """The pending transfer that the request resolves, or the charge that it refunds or forfeits."""
    match request:
        case Post() | Void() | Expire():
            return request.pending
        case Refund() | Forfeit():
            return request.charge
        case Grant() | Reserve() | Vest() | Payout():
            return None
    assert_never(request)


def digest_of_request(request: TransferRequest) -> str:
    """SHA-256 of the content in hexadecimal: equal for equal requests, whatever their id."""
    match request:
        case Grant():
            parts: tuple[object, ...] = (request.to, request.amount)
        case Refund():
            parts = (request.charge, request.amount)
        case Reserve():
            parts = (request.payer, request.pending, request.amount, request.expires_at)
        case Post():
            postings = sorted((each.account, each.amount) for each in request.postings)
            parts = (request.pending, *(f"{account}={amount}" for account, amount in postings))
        case Void() | Expire():
            parts = (request.pending,)
        case Vest():
            parts = (request.vesting, request.owner, request.amount)
        case Forfeit():
            parts = (request.charge, request.vesting, request.share, request.fee)
        case Payout():
            parts = (request.owner, request.paid, request.amount)
        case _:
            assert_never(request)
    text = "\n".join((kind_of(request).value, *map(str, parts)))
    return sha256(text.encode()).hexdigest()


def checked_id(text: str) -> TransferId:
    if not _ID.fullmatch(text):
        raise Invalid(
            f"{text[:40]!r} is not a transfer id; use 1 to {MAX_ID_LENGTH} of: a-z 0-9 : . _ -"
        )
    return TransferId(text)


def checked_amount(amount: object) -> int:
    """The amount, if it is an integer from 1 to `MAX_AMOUNT`; else `Invalid`."""
    if type(amount) is not int or not 0 < amount <= MAX_AMOUNT:
        raise Invalid(f"{amount!r} is not an amount; use 1 to {MAX_AMOUNT} micro-credits")
    return amount


# ---- amounts and months as text


def parse_credits(text: str) -> int:
    """Parse credits with up to six decimals (`2.50`) to micro-credits; `Invalid` if it is not an amount."""
    try:
        return checked_amount(parse_price(text if "/" not in text else ""))
    except Invalid:
        raise Invalid(
            f"{text[:40]!r} is not an amount; write credits with up to six decimals, like 2.50"
        ) from None


def format_credits(amount: int) -> str:
    """`2.50` for 2,500,000 micro-credits."""
    sign = "-" if amount < 0 else ""
    return sign + format_price(abs(amount)).removesuffix("/h")


def month_of(at: Instant) -> int:
    """Number of the month in UTC: year x 12 + month - 1."""
    moment = _EPOCH + timedelta(microseconds=at)
    return moment.year * 12 + moment.month - 1


def format_month(month: int) -> str:
    """`2026-11`."""
    return f"{month // 12}-{month % 12 + 1:02d}"
