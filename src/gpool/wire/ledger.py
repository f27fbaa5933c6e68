"""REST documents of the ledger: balances, entries, grants, refunds, budgets, verification, deposits. Amounts are micro-credits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from gpool.core.money.budgets import BudgetLevel
from gpool.core.money.transfers import MAX_AMOUNT, TransferKind
from gpool.wire.documents import Answer, Document

Amount = Annotated[int, Field(ge=1, le=MAX_AMOUNT, strict=True)]
ChosenId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9:._-]{0,79}$")]
Note = Annotated[str, StringConstraints(max_length=200)]


class LedgerEntryDocument(Answer):
    """One entry of an account. `number` counts the account's entries; `balance_microcredits`: after it."""

    number: int
    kind: TransferKind
    transfer: str
    at: AwareDatetime
    amount_microcredits: int
    balance_microcredits: int


class LedgerDocument(Answer):
    """Funds of a user or team. `pending`: set aside for work in progress; `earned`: by the user's own nodes.

    `spent` counts what was set aside in the month and did not return; `budget` null: no cap.
    """

    balance_microcredits: int
    pending_microcredits: int
    earned_microcredits: int
    month: str  # 2026-11, in UTC
    spent_microcredits: int
    budget_microcredits: int | None
    budget_level: BudgetLevel | None
    entries: list[LedgerEntryDocument]  # newest first
    next: str | None = None


class BudgetRequest(Document):
    """`cap_microcredits`: most that may be spent in each month; null: no cap."""

    cap_microcredits: Amount | None


class BudgetDocument(Answer):
    month: str
    spent_microcredits: int
    budget_microcredits: int | None
    budget_level: BudgetLevel | None


class GrantRequest(Document):
    """`to`: id of a user or team. `id`: the same one twice moves once. `note`: kept in the audit record."""

    to: str
    amount_microcredits: Amount
    id: ChosenId | None = None
    note: Note = ""


class RefundRequest(Document):
    """`charge`: transfer of kind `post` whose payer gets the amount back."""

    charge: ChosenId
    amount_microcredits: Amount
    id: ChosenId | None = None
    note: Note = ""


class TransferDocument(Answer):
    """`outcome`: `moved`, or `repeated` if the id was used for the same transfer before."""

    id: str
    outcome: Literal["moved", "repeated"]


class BlockDocument(Answer):
    number: int
    hash: str
    sealed_at: AwareDatetime


class PoolLedgerDocument(Answer):
    """Accounts of the pool. `treasury`: credits issued, negated; `uncleared`: set aside and not resolved."""

    treasury_microcredits: int
    fee_microcredits: int
    uncleared_microcredits: int
    uncleared_since: AwareDatetime | None
    head: BlockDocument | None


class LedgerFindingDocument(Answer):
    thing: str
    why: str


class LedgerCheckDocument(Answer):
    """Result of recomputing the ledger. Keep `head` (NUMBER:HASH) where no operator can change it."""

    sound: bool
    transfers: int
    entries: int
    unsealed: int
    head: str | None
    findings: list[LedgerFindingDocument]


# ---- deposits

DepositStatus = Literal["credited", "unmatched", "held"]


class DepositDocument(Answer):
    """A transfer on the chain with enough confirmations. `amount`: in units of the token, decimal.

    `unmatched`: no account has the sender's wallet yet; `held`: an operator decides about it.
    """

    transfer: str  # id in the ledger
    transaction: str
    log_index: int
    block: int
    sender: str
    amount: str
    status: DepositStatus
    changed_at: AwareDatetime


class DepositsDocument(Answer):
    """Where to send tokens. `wallets`: yours; only transfers from them are credited to you.

    `scanned_block`: null before the first scan. `halted`: crediting is stopped until an operator acts.
    """

    chain_id: int
    token: str
    address: str
    confirmations: int
    scanned_block: int | None
    halted: bool
    wallets: list[str]
    items: list[DepositDocument]  # newest first


class PoolDepositsDocument(Answer):
    """`items`: deposits that are not credited. `why`: reason for which crediting is halted, or empty."""

    chain_id: int
    token: str
    address: str
    confirmations: int
    scanned_block: int | None
    halted_at: AwareDatetime | None
    why: str
    items: list[DepositDocument]


class DepositsResume(Document):
    """`from_block`: scanned again from here on; what is credited already is not credited again."""

    from_block: Annotated[int, Field(ge=0, lt=1 << 62, strict=True)]
