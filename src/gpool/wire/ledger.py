"""REST documents of the ledger: balances, entries, grants, refunds, budgets, verification. Amounts are micro-credits."""

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
