"""REST documents of receipts, statements, earnings, rewards and payouts. Amounts are micro-credits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from gpool.wire.documents import Answer, Document
from gpool.wire.ledger import Amount

MonthText = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$")]


class ReceiptSummaryDocument(Answer):
    """A receipt without its signatures. `side`: whether your account paid it, or earned it."""

    id: str
    side: Literal["paid", "earned"]
    task: str
    attempt: int
    node: str
    issued_at: AwareDatetime
    amount_microcredits: int
    fee_microcredits: int


class ReceiptPage(Answer):
    items: list[ReceiptSummaryDocument]
    next: str | None = None


class ReceiptDocument(Answer):
    """A receipt in canonical form, byte by byte (docs/guides/receipts-and-payouts.md)."""

    version: int
    work: dict[str, Any]
    node_key: str
    node_signature: str
    charge: dict[str, Any]
    pool_key: str
    pool_signature: str


class PayoutFileDocument(Answer):
    """A payout file in canonical form, byte by byte."""

    version: int
    pool: str
    period: int
    lines: list[dict[str, str]]
    total_due: str
    total_cumulative: str
    receipts_root: str
    previous_sha3: str
    distributor: dict[str, Any] | None = None
    root: str | None = None


class StatementLineDocument(Answer):
    """A charge. `team`: of the task, null for a task without one. `project`: the payer's
    label, shown to the payer. `state`: metered or held (not posted yet), posted (vests later), vested, forfeited (returned)."""

    side: Literal["spent", "earned"]
    ended_at: AwareDatetime
    started_at: AwareDatetime | None
    task: str
    attempt: int
    node: str
    user: str | None
    team: str | None
    project: str | None
    gpus: list[str]
    charged_s: float
    price_microcredits: int
    amount_microcredits: int
    fee_microcredits: int
    end_reason: str
    state: str
    receipt: str | None


class UsagePage(Answer):
    """Charges of one or more months, oldest first. `month`: the last one."""

    month: str
    items: list[StatementLineDocument]
    next: str | None = None


class UseDocument(Answer):
    """Use of one group, charged or not. `side`: used by your tasks, or served to others by your nodes.

    `group`: GPU model, node, month, team or project, as asked for; empty: none; owners see no labels of others. `gpu_s`: a half GPU counts half.
    """

    side: Literal["used", "served"]
    group: str
    attempts: int
    run_s: float
    gpu_s: float


class UsePage(Answer):
    """Totals of use from `first_month` to `month`."""

    first_month: str
    month: str
    items: list[UseDocument]
    next: str | None = None


class EarningDocument(Answer):
    """Earnings of one node's GPUs in a month, fees not included."""

    month: str
    node: str
    gpus: list[str]
    state: str
    attempts: int
    charged_s: float
    microcredits: int


class RewardOfMonth(Answer):
    month: str
    microcredits: int


class WalletChangeDocument(Answer):
    """`address` null: no payout wallet from then on."""

    at: AwareDatetime
    address: str | None


class EarningsDocument(Answer):
    """`unvested` can still be forfeited; `vested` is paid with the next period; `paid` left the books."""

    unvested_microcredits: int
    vested_microcredits: int
    paid_microcredits: int
    items: list[EarningDocument]
    rewards: list[RewardOfMonth]
    wallets: list[WalletChangeDocument]


class PayoutDocument(Answer):
    """A closed period. `own_microcredits`: your part of it. Totals are decimal text, as in the payout file."""

    number: int
    month: str
    closed_at: AwareDatetime
    accounts: int
    total_due: str
    root: str | None
    receipts_root: str
    own_microcredits: int
    own_payee: str | None


class PayoutPage(Answer):
    items: list[PayoutDocument]
    next: str | None = None


class ClosePeriodRequest(Document):
    """Close a month. Chain and contract: of the distributor; without them the pool pays by other means."""

    month: MonthText
    chain_id: Annotated[int, Field(ge=1, le=(1 << 53) - 1)] | None = None
    contract: Annotated[str, StringConstraints(max_length=42)] | None = None
    dry_run: bool = False


class ClosedPeriodDocument(Answer):
    """`file`: the payout file as text, byte by byte. `accrued`: owners without a wallet, who are paid later."""

    number: int
    month: str
    accounts: int
    accrued: int
    accrued_microcredits: int
    total_due: str
    file: str | None


class RewardsRequest(Document):
    month: MonthText
    pool_microcredits: Amount
    dry_run: bool = False


class RewardShareDocument(Answer):
    owner: str
    weight: int
    microcredits: int


class RewardsDocument(Answer):
    month: str
    pool_microcredits: int
    items: list[RewardShareDocument]
