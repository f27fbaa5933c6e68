"""Random money moves: batches that depend on seed and number only, the books that they lead to, and a process that writes
them and kills itself between two steps.

    python -m tests.tools.ledger_moves DATABASE SEED FIRST LAST STEP

writes the batches FIRST to LAST-1, prints the number of each committed one, and ends itself with SIGKILL at step STEP:
before a statement, or between the last statement and the commit. With a negative STEP, -N: between the commit of the
N-th batch and its acknowledgement.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpool.core.model import Instant
from gpool.core.money.ledger import (
    Charge,
    LedgerAccount,
    LedgerChanges,
    LedgerView,
    PendingTransfer,
    apply,
)
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
    Posting,
    Refund,
    Reserve,
    TransferId,
    TransferKind,
    TransferRequest,
    Vest,
    Void,
)
from gpool.server.store.drivers.sqlite import SqliteStore
from gpool.server.store.operations.money import accounts, transfers
from gpool.server.store.operations.money.accounts import NewAccount
from gpool.server.store.operations.money.transfers import RecordedTransfers
from gpool.server.store.protocol import Operation, operation

PAYERS = 20
BATCH = 50
RESERVES = 25
"""Requests at the start of each batch that set funds aside; later ones resolve those of the last four batches."""
START = Instant(1_790_000_000_000_000)
DAY = 86_400_000_000


def payer(number: int) -> LedgerAccountId:
    return LedgerAccountId(100 + 3 * number)


def held(number: int) -> LedgerAccountId:
    return LedgerAccountId(101 + 3 * number)


def owner(number: int) -> LedgerAccountId:
    return LedgerAccountId(102 + 3 * number)


def unvested(number: int) -> LedgerAccountId:
    """Stays empty: without rows of `charges`, verification expects nothing in it."""
    return LedgerAccountId(1000 + 2 * number)


def paid_out(number: int) -> LedgerAccountId:
    return LedgerAccountId(1001 + 2 * number)


NEW = [
    NewAccount(("user", 1 + number), kind, id_)
    for number in range(PAYERS)
    for kind, id_ in (
        (AccountKind.USER, payer(number)),
        (AccountKind.PENDING, held(number)),
        (AccountKind.OWNER, owner(number)),
        (AccountKind.VESTING, unvested(number)),
        (AccountKind.PAID, paid_out(number)),
    )
]


def at_of(batch: int) -> Instant:
    return Instant(START + batch * DAY // 20)


def batch_of(seed: int, batch: int) -> list[TransferRequest]:
    """Requests of one write: most are possible, some repeat an id, some exceed a floor or a reservation."""
    dice = random.Random(f"{seed} {batch}")
    return [_request(dice, batch, place) for place in range(BATCH)]


def _request(dice: random.Random, batch: int, place: int) -> TransferRequest:
    earlier = max(0, batch - dice.randint(0, 3))
    about = TransferId(f"r-{earlier}-{dice.randrange(RESERVES)}")
    if (
        dice.random() < 0.05 and batch
    ):  # an id of an earlier batch, with its own content or another one
        place, batch = dice.randrange(BATCH), batch - 1
    kind = TransferKind.RESERVE
    if place >= RESERVES:
        kind = dice.choices(list(TransferKind), (6, 3, 2, 20, 6, 3, 1, 1, 4))[0]
    who = dice.randrange(PAYERS)
    amount = dice.choice((1, dice.randint(1, 5_000), dice.randint(1, 2_000_000)))
    own = TransferId(f"{kind.value[0]}-{batch}-{place}")
    match kind:
        case TransferKind.GRANT:
            return Grant(own, payer(who), 40 * amount)
        case TransferKind.REFUND:
            return Refund(own, TransferId(f"p{about[1:]}"), amount)
        case TransferKind.RESERVE:
            return Reserve(own, payer(who), held(who), amount, Instant(at_of(batch) + DAY // 10))
        case TransferKind.POST:
            fee = (Posting(FEE, 1 + amount // 1000),) if dice.random() < 0.5 else ()
            paid = max(1, amount // 100) if dice.random() < 0.8 else amount
            return Post(own, about, (Posting(owner(who), paid), *fee))
        case TransferKind.VOID:
            return Void(own, about)
        case TransferKind.EXPIRE:
            return Expire(own, about)
        case TransferKind.VEST:
            return Vest(own, unvested(who), owner(who), amount)
        case TransferKind.FORFEIT:
            return Forfeit(own, TransferId(f"p{about[1:]}"), unvested(who), amount, 1)
        case TransferKind.PAYOUT:
            return Payout(own, owner(who), paid_out(who), amount)


class ModelBooks:
    """The books in memory: every batch is applied once, and nothing ever crashes."""

    def __init__(self) -> None:
        pool = ((TREASURY, AccountKind.TREASURY), (FEE, AccountKind.FEE))
        kinds = (*pool, *((each.id, each.kind) for each in NEW))
        self.accounts = {id_: LedgerAccount(id_, kind) for id_, kind in kinds}
        self.pending: dict[TransferId, PendingTransfer] = {}
        self.digests: dict[TransferId, str] = {}
        self.charges: dict[TransferId, Charge] = {}
        self.entries = 0

    def write(self, requests: Sequence[TransferRequest], at: Instant) -> LedgerChanges:
        about = {each.pending for each in requests if isinstance(each, Post | Void | Expire)}
        charged = {each.charge for each in requests if isinstance(each, Refund | Forfeit)}
        view = LedgerView(
            self.accounts,
            {id_: self.pending[id_] for id_ in about if id_ in self.pending},
            {each.id: self.digests[each.id] for each in requests if each.id in self.digests},
            {id_: self.charges[id_] for id_ in charged if id_ in self.charges},
        )
        changes = apply(view, requests, at)
        self.accounts |= {each.id: each for each in changes.accounts}
        for each in changes.reserved + changes.resolved:
            self.pending[each.id] = each
            if each.resolved_by is not None and each.returned < each.amount:
                self.charges[each.resolved_by] = Charge(each.payer, each.amount - each.returned)
        for transfer in changes.transfers:
            self.digests[transfer.id] = transfer.digest
            if transfer.kind is TransferKind.REFUND and transfer.refers_to is not None:
                paid = sum(
                    e.amount for e in changes.entries if e.transfer == transfer.id and e.amount > 0
                )
                before = self.charges[transfer.refers_to]
                self.charges[transfer.refers_to] = replace(before, refunded=before.refunded + paid)
        self.entries += len(changes.entries)
        return changes


@operation
def open_all() -> Operation[None]:
    yield from accounts.open_accounts(NEW)


class SelfKill:
    """Ends the process at one step (see above)."""

    def __init__(self, step: int) -> None:
        self._steps, self._commits = max(0, step), max(0, -step)

    def step(self) -> None:
        self._steps = self._counted(self._steps)

    def commit(self) -> None:
        self._commits = self._counted(self._commits)

    @staticmethod
    def _counted(left: int) -> int:
        if left == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return left - 1

    @staticmethod
    @operation
    def through(kill: SelfKill, seed: int, batch: int) -> Operation[RecordedTransfers]:
        """The write of one batch, with a step before each statement and one before the commit."""
        inner = transfers.record(batch_of(seed, batch), at_of(batch))
        rows: object = None
        while True:
            kill.step()
            try:
                statement = inner.send(rows)
            except StopIteration as stop:
                result: RecordedTransfers = stop.value
                return result
            rows = yield statement


def main(database: str, seed: int, first: int, last: int, step: int) -> Iterator[int]:
    store, kill = SqliteStore.inline(Path(database)), SelfKill(step)
    store.write_now(open_all())
    for batch in range(first, last):
        store.write_now(SelfKill.through(kill, seed, batch))
        kill.commit()
        yield batch
    store.close()


if __name__ == "__main__":
    for done in main(sys.argv[1], *(int(word) for word in sys.argv[2:])):
        sys.stdout.write(f"{done}\n")
        sys.stdout.flush()
