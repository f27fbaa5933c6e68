"""The ledger's one decision: which requests move money, given the accounts they name. Pure; the store writes the result.

Double entry. A transfer is a set of entries that sum to zero, one for each account:

    grant     treasury -10.00   ann      +10.00
    reserve   ann       -2.00   pending   +2.00      2.00 are set aside while the task runs
    post      pending   -2.00   owner     +1.35   fee +0.15   ann +0.50      1.50 charged, the rest returns
    void      pending   -2.00   ann       +2.00      or: nothing is charged
    vest      vesting   -1.35   owner     +1.35      the owner was paid into vesting; its window is over
    forfeit   vesting   -1.35   fee       -0.15   ann +1.50      or: the node was caught within the window
    payout    owner     -1.35   paid      +1.35      paid outside the books

A pending transfer is resolved at most once, by `post`, `void` or `expire`; what is charged never exceeds what was set
aside, because the postings are paid from it. Every entry has the number of its account's entry before plus one, and the
balance after it, so that a removed, added or changed entry is found by reading one account.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, assert_never

from gpool.core.model import Instant
from gpool.core.money.budgets import BudgetWarning, crossed
from gpool.core.money.transfers import (
    FEE,
    TREASURY,
    AccountKind,
    Expire,
    Forfeit,
    Grant,
    LedgerAccountId,
    Payout,
    Post,
    Refund,
    Reserve,
    TransferId,
    TransferKind,
    TransferOutcome,
    TransferRequest,
    Vest,
    Void,
    digest_of_request,
    floor_of,
    kind_of,
    month_of,
    refers_to,
)

Amounts = dict[LedgerAccountId, int]
"""Signed amount of each account in one transfer."""


@dataclass(frozen=True, slots=True)
class LedgerAccount:
    """`sequence`: number of its last entry; 0: none yet."""

    id: LedgerAccountId
    kind: AccountKind
    balance: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """Funds set aside: `amount` of `payer`, in its pending account. `returned`: to the payer, at the resolution."""

    id: TransferId
    payer: LedgerAccountId
    account: LedgerAccountId
    amount: int
    month: int
    expires_at: Instant
    resolved_by: TransferId | None = None
    returned: int = 0


@dataclass(frozen=True, slots=True)
class Charge:
    """A posted pending transfer. `refunded`: returned to the payer so far. `forfeited`: taken from owner and fee."""

    payer: LedgerAccountId
    amount: int
    refunded: int = 0
    forfeited: int = 0


@dataclass(frozen=True, slots=True)
class Spending:
    cap: int
    spent: int


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The part of the ledger that some requests name. `spending`: of payers with a budget, in the month of `at`."""

    accounts: Mapping[LedgerAccountId, LedgerAccount]
    pending: Mapping[TransferId, PendingTransfer] = field(default_factory=dict)
    digests: Mapping[TransferId, str] = field(default_factory=dict)
    charges: Mapping[TransferId, Charge] = field(default_factory=dict)
    spending: Mapping[LedgerAccountId, Spending] = field(default_factory=dict)


class LedgerEntry(NamedTuple):
    account: LedgerAccountId
    sequence: int
    transfer: TransferId
    amount: int
    balance: int  # after it


@dataclass(frozen=True, slots=True)
class RecordedTransfer:
    """`refers_to`: the pending transfer that it resolves, or the charge that it refunds."""

    id: TransferId
    kind: TransferKind
    at: Instant
    digest: str
    refers_to: TransferId | None


@dataclass(frozen=True, slots=True)
class LedgerChanges:
    """Result of `apply`: an outcome for each request, in order, and the rows to write."""

    outcomes: tuple[TransferOutcome, ...]
    transfers: tuple[RecordedTransfer, ...]
    entries: tuple[LedgerEntry, ...]
    accounts: tuple[LedgerAccount, ...]  # changed ones, after the last entry
    reserved: tuple[PendingTransfer, ...]
    resolved: tuple[PendingTransfer, ...]
    spent: Mapping[tuple[LedgerAccountId, int], int]  # by payer and month, what is added
    warnings: tuple[BudgetWarning, ...]


def apply(view: LedgerView, requests: Iterable[TransferRequest], at: Instant) -> LedgerChanges:
    """Decide each request after those before it. A refused one changes nothing."""
    return _Book(view, at).run(requests)


def apply_bundles(
    view: LedgerView, bundles: Sequence[Sequence[TransferRequest]], at: Instant
) -> tuple[LedgerChanges, tuple[TransferOutcome, ...]]:
    """Decide bundles in order, each whole or not at all; return the changes and, for each, its first refusal or MOVED.

    A refused bundle is left out and the others are decided again, since they may have counted on its money: each
    round leaves out at least one.
    """
    refused: dict[int, TransferOutcome] = {}
    while True:
        taken = [number for number in range(len(bundles)) if number not in refused]
        changes = apply(view, [each for number in taken for each in bundles[number]], at)
        outcomes, before = iter(changes.outcomes), len(refused)
        for number in taken:
            for outcome in [next(outcomes) for _ in bundles[number]]:
                if not outcome.is_done:
                    refused.setdefault(number, outcome)
        if len(refused) == before:
            moved = TransferOutcome.MOVED
            return changes, tuple(refused.get(number, moved) for number in range(len(bundles)))


PAYER_KINDS = (
    [AccountKind.USER, AccountKind.PENDING],
    [AccountKind.TEAM, AccountKind.PENDING],
)


class _Book:
    """A view with the requests so far applied to it."""

    def __init__(self, view: LedgerView, at: Instant) -> None:
        self._at, self._month = at, month_of(at)
        self._accounts = dict(view.accounts)
        self._pending = dict(view.pending)
        self._digests = dict(view.digests)
        self._charges = dict(view.charges)
        self._spending = dict(view.spending)
        self._transfers: list[RecordedTransfer] = []
        self._entries: list[LedgerEntry] = []
        self._reserved: dict[TransferId, None] = {}
        self._resolved: dict[TransferId, None] = {}
        self._spent: dict[tuple[LedgerAccountId, int], int] = {}
        self._warnings: list[BudgetWarning] = []

    def run(self, requests: Iterable[TransferRequest]) -> LedgerChanges:
        outcomes = tuple([self._decide(each) for each in requests])
        changed = sorted({entry.account for entry in self._entries})
        return LedgerChanges(
            outcomes,
            tuple(self._transfers),
            tuple(self._entries),
            tuple(self._accounts[account] for account in changed),
            tuple(self._pending[id_] for id_ in self._reserved),
            tuple(self._pending[id_] for id_ in self._resolved if id_ not in self._reserved),
            {key: amount for key, amount in self._spent.items() if amount},
            tuple(self._warnings),
        )

    def _decide(self, request: TransferRequest) -> TransferOutcome:
        known, digest = self._digests.get(request.id), digest_of_request(request)
        if known is not None:
            return TransferOutcome.REPEATED if known == digest else TransferOutcome.ID_REUSED
        match request:
            case Grant():
                outcome = self._grant(request)
            case Refund():
                outcome = self._refund(request)
            case Reserve():
                outcome = self._reserve(request)
            case Post():
                paid = {each.account: each.amount for each in request.postings}
                outcome = self._resolve(request, request.pending, paid)
            case Void() | Expire():
                outcome = self._resolve(request, request.pending, {})
            case Vest():
                kinds = (AccountKind.VESTING, AccountKind.OWNER)
                outcome = self._pass_on(request, request.vesting, request.owner, kinds)
            case Payout():
                kinds = (AccountKind.OWNER, AccountKind.PAID)
                outcome = self._pass_on(request, request.owner, request.paid, kinds)
            case Forfeit():
                outcome = self._forfeit(request)
            case _:
                assert_never(request)
        if outcome is TransferOutcome.MOVED:
            self._digests[request.id] = digest
            recorded = RecordedTransfer(
                request.id, kind_of(request), self._at, digest, refers_to(request)
            )
            self._transfers.append(recorded)
        return outcome

    def _move(self, request: TransferRequest, amounts: Amounts) -> TransferOutcome:
        if not amounts.keys() <= self._accounts.keys():
            return TransferOutcome.NO_ACCOUNT
        after = []
        for account, amount in sorted(amounts.items()):
            before = self._accounts[account]
            balance = before.balance + amount
            if amount < 0 and balance < floor_of(before.kind):
                return TransferOutcome.NO_FUNDS
            after.append(replace(before, balance=balance, sequence=before.sequence + 1))
        for state in after:
            self._accounts[state.id] = state
            amount = amounts[state.id]
            self._entries.append(
                LedgerEntry(state.id, state.sequence, request.id, amount, state.balance)
            )
        return TransferOutcome.MOVED

    def _kind(self, account: LedgerAccountId) -> AccountKind | None:
        found = self._accounts.get(account)
        return None if found is None else found.kind

    def _is_payee(self, account: LedgerAccountId) -> bool:
        """Return whether a charge may pay the account: pending accounts hold what is set aside, nothing else."""
        return self._kind(account) not in (None, AccountKind.PENDING, AccountKind.PAID)

    def _grant(self, request: Grant) -> TransferOutcome:
        # an earning that vests comes from a charge, which a forfeit can return
        if not self._is_payee(request.to) or self._kind(request.to) is AccountKind.VESTING:
            return TransferOutcome.NO_ACCOUNT
        return self._move(request, {TREASURY: -request.amount, request.to: request.amount})

    def _refund(self, request: Refund) -> TransferOutcome:
        charge = self._charges.get(request.charge)
        if charge is None:
            return TransferOutcome.NO_CHARGE
        if charge.refunded + request.amount > charge.amount:
            return TransferOutcome.TOO_MUCH
        outcome = self._move(request, {TREASURY: -request.amount, charge.payer: request.amount})
        if outcome is TransferOutcome.MOVED:
            refunded = charge.refunded + request.amount
            self._charges[request.charge] = replace(charge, refunded=refunded)
        return outcome

    def _forfeit(self, request: Forfeit) -> TransferOutcome:
        charge = self._charges.get(request.charge)
        if charge is None:
            return TransferOutcome.NO_CHARGE
        if self._kind(request.vesting) is not AccountKind.VESTING:
            return TransferOutcome.NO_ACCOUNT
        total = request.share + request.fee
        returned = min(total, charge.amount - charge.refunded)
        if charge.forfeited + total > charge.amount:
            return TransferOutcome.TOO_MUCH
        amounts = {request.vesting: -request.share}
        if request.fee:
            amounts[FEE] = -request.fee
        if returned:
            amounts[charge.payer] = returned
        if total > returned:
            amounts[TREASURY] = total - returned
        outcome = self._move(request, amounts)
        if outcome is TransferOutcome.MOVED:
            self._charges[request.charge] = replace(
                charge,
                refunded=charge.refunded + returned,
                forfeited=charge.forfeited + total,
            )
        return outcome

    def _pass_on(
        self,
        request: Vest | Payout,
        source: LedgerAccountId,
        target: LedgerAccountId,
        kinds: tuple[AccountKind, AccountKind],
    ) -> TransferOutcome:
        """Move between two accounts of one owner."""
        if (self._kind(source), self._kind(target)) != kinds:
            return TransferOutcome.NO_ACCOUNT
        return self._move(request, {source: -request.amount, target: request.amount})

    def _reserve(self, request: Reserve) -> TransferOutcome:
        budget = self._spending.get(request.payer)
        is_over = budget is not None and budget.spent + request.amount > budget.cap
        if is_over and not request.is_counted:
            return TransferOutcome.OVER_BUDGET
        payer, pending, amount = request.payer, request.pending, request.amount
        kinds = [self._accounts[id_].kind for id_ in (payer, pending) if id_ in self._accounts]
        if kinds not in PAYER_KINDS:
            return TransferOutcome.NO_ACCOUNT
        outcome = self._move(request, {payer: -amount, pending: amount})
        if outcome is TransferOutcome.MOVED:
            self._reserved[request.id] = None
            self._pending[request.id] = PendingTransfer(
                request.id, payer, pending, amount, self._month, request.expires_at
            )
            self._spend(payer, self._month, amount)
        return outcome

    def _resolve(
        self, request: Post | Void | Expire, id_: TransferId, paid: Amounts
    ) -> TransferOutcome:
        pending = self._pending.get(id_)
        if pending is None:
            return TransferOutcome.NO_PENDING
        if pending.resolved_by is not None:
            return TransferOutcome.RESOLVED
        if isinstance(request, Expire) and self._at < pending.expires_at:
            return TransferOutcome.NOT_DUE
        returned = pending.amount - sum(paid.values())
        if returned < 0 or paid.keys() & {pending.payer, pending.account}:
            return TransferOutcome.TOO_MUCH
        if not all(map(self._is_payee, paid)):
            return TransferOutcome.NO_ACCOUNT
        amounts = {pending.account: -pending.amount, **paid}
        if returned:
            amounts[pending.payer] = returned
        outcome = self._move(request, amounts)
        if outcome is TransferOutcome.MOVED:
            self._resolved[id_] = None
            self._pending[id_] = replace(pending, resolved_by=request.id, returned=returned)
            self._spend(pending.payer, pending.month, -returned)
            if paid:
                self._charges[request.id] = Charge(pending.payer, pending.amount - returned)
        return outcome

    def _spend(self, payer: LedgerAccountId, month: int, amount: int) -> None:
        key = (payer, month)
        self._spent[key] = self._spent.get(key, 0) + amount
        budget = self._spending.get(payer)
        if budget is None or month != self._month:
            return
        after = budget.spent + amount
        level = crossed(budget.spent, after, budget.cap)
        if level is not None:
            self._warnings.append(BudgetWarning(payer, month, level, after, budget.cap))
        self._spending[payer] = replace(budget, spent=after)
