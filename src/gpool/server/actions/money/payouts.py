"""Closing of periods and rewards, by operators; the list of closed periods. The routes have checked LEDGER_GRANT."""

from __future__ import annotations

import msgspec

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.gpu_verification import MeasuredSpeed
from gpool.core.ids import NodeId, UserId, encode
from gpool.core.model import SECOND, Instant
from gpool.core.money.rewards import Contribution, availability_ppm, shares_of, weights_of
from gpool.core.money.transfers import format_month, month_of
from gpool.core.permissions import Action, ObjectKind, Thing
from gpool.server.actions.audit import audited, entry, note_read
from gpool.server.actions.money.statements import LAST, parse_month, span_of
from gpool.server.identity.authorization import permit
from gpool.server.server import Once, Server
from gpool.server.store.generated_rows import PayoutLinesRecord, PayoutsRecord
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.money import payouts as operations
from gpool.server.store.operations.money import receipts
from gpool.server.store.operations.money.payouts import ClosedPeriod, NewReward
from gpool.wallet import payouts as files
from gpool.wallet import signing
from gpool.wallet.errors import BadAddress
from gpool.wallet.receipts import receipts_root
from gpool.wire.documents import instant_to_datetime
from gpool.wire.earnings import (
    ClosedPeriodDocument,
    ClosePeriodRequest,
    PayoutDocument,
    PayoutPage,
    RewardsDocument,
    RewardShareDocument,
    RewardsRequest,
)

PAGE = 1000
MOST_DIGITS = 15
REPAIR_US = 3600 * SECOND
"""Time that a loss of a node counts for in its availability."""


async def payouts(server: Server, own: tuple[int, ...], before: int, limit: int) -> PayoutPage:
    """Closed periods, newest first, with the part of these accounts."""
    found = await server.store.read(operations.payouts(before, limit))
    mine = await server.store.read(operations.lines_of(own)) if own else ()
    lines = {line.number: line for line in mine}
    items = [
        PayoutDocument(
            number=row.number,
            month=format_month(row.month),
            closed_at=instant_to_datetime(row.closed_at),
            accounts=row.accounts,
            total_due=row.total_due,
            root=row.root,
            receipts_root=row.receipts_root,
            own_microcredits=lines[row.number].microcredits if row.number in lines else 0,
            own_payee=lines[row.number].payee if row.number in lines else None,
        )
        for row in found
    ]
    return PayoutPage(items=items, next=str(found[-1].number) if len(found) == limit else None)


async def payout_file(server: Server, who: Caller, text: str) -> bytes:
    """Canonical bytes of a period's payout file, for everybody with an account: claims need all its lines."""
    if not text.isdecimal() or not text.isascii() or len(text) > MOST_DIGITS:
        raise Invalid(f"{text[:20]!r} is not the number of a period: gpool payout ls")
    number = int(text)
    own = Thing(ObjectKind.ACCOUNT, owner=who.user.id)
    permit(who, Action.LEDGER_READ, own, text)
    await note_read(server, who, Action.LEDGER_READ, Thing(ObjectKind.ACCOUNT), f"payout {number}")
    found = await server.store.read(operations.payouts(number + 1, 1))
    if not found or found[0].number != number:
        raise NotFound(f"no period {number} on this server: gpool payout ls")
    return found[0].body


async def close(
    server: Server, who: Caller, wanted: ClosePeriodRequest, once: Once | None
) -> ClosedPeriodDocument:
    """Build the payout file of a month that is over, and record its amounts as paid."""
    month, now = parse_month(wanted.month), server.now
    if month >= month_of(now):
        raise Conflict(f"{wanted.month} is not over: its receipts are still being issued")
    at = _distributor(wanted)
    newest = await server.store.read(operations.payouts(LAST, 1))
    previous = files.parse(newest[0].body) if newest else None
    amounts = {} if previous is None else previous.cumulative()
    lines: list[PayoutLinesRecord] = []
    paid: dict[int, UserId] = {}
    accrued = accrued_sum = 0
    number = newest[0].number + 1 if newest else 1
    for row in await server.store.read(operations.owner_balances()):
        payee = encode("account", row.account_id) if at is None else None
        if row.wallet is not None:
            payee = signing.from_bytes(bytes.fromhex(row.wallet[2:]))
        if payee is None:
            accrued, accrued_sum = accrued + 1, accrued_sum + row.microcredits
            continue
        amounts[payee] = amounts.get(payee, 0) + row.microcredits
        lines.append(PayoutLinesRecord(number, row.account_id, payee, row.microcredits))
        paid[row.account_id] = row.user_id
    if not lines:
        raise Conflict("no owner with a payout wallet has vested earnings: nothing is due")
    root = receipts_root(await _receipts(server, newest[0].month if newest else None, month))
    period = files.Period(server.identity.receipts.pool, number, root, at)
    file = files.close(period, amounts, previous)
    body = file.to_bytes()
    document = ClosedPeriodDocument(
        number=number,
        month=wanted.month,
        accounts=len(lines),
        accrued=accrued,
        accrued_microcredits=accrued_sum,
        total_due=file.total_due,
        file=body.decode(),
    )
    if wanted.dry_run:
        return document
    record = PayoutsRecord(
        number, month, now, len(lines), file.total_due, file.root, file.receipts_root, body
    )
    ids = list(server.ids.take(len(lines)))
    change = operations.put_payout(ClosedPeriod(record, lines, paid, ids), now)
    note = entry(now, who, "payout.close", wanted.month, total_due=file.total_due)
    answered = await server.write_once(
        who.user, once, audited(change, [note]), lambda _: document.model_dump_json().encode()
    )
    return ClosedPeriodDocument.model_validate_json(answered.body)


def _distributor(wanted: ClosePeriodRequest) -> files.DistributorAddress | None:
    if (wanted.chain_id is None) != (wanted.contract is None):
        raise Invalid("chain_id and contract are given together")
    if wanted.chain_id is None or wanted.contract is None:
        return None
    try:
        signing.parse(wanted.contract)
    except BadAddress as exc:
        raise Invalid(exc.detail) from exc
    return files.DistributorAddress(wanted.chain_id, wanted.contract)


async def _receipts(server: Server, after_month: int | None, month: int) -> list[bytes]:
    """Receipts issued since the month that was closed last, up to this month."""
    found: list[bytes] = []
    first = month if after_month is None else after_month + 1
    for each in range(min(first, month), month + 1):
        last = 0
        while True:
            last, page = await server.store.read(receipts.bodies(each, last, PAGE))
            if not page:
                break
            found += page
    return found


# ---- rewards


async def rewards(
    server: Server, who: Caller, wanted: RewardsRequest, once: Once | None
) -> RewardsDocument:
    """Share a pool by the contributions of a month that is over; with `dry_run` only tell the shares."""
    month, now = parse_month(wanted.month), server.now
    if month >= month_of(now) and not wanted.dry_run:
        raise Conflict(f"{wanted.month} is not over: contributions still grow")
    found = weights_of(await _contributions(server, month))
    shares = shares_of(wanted.pool_microcredits, found)
    made = [NewReward(UserId(owner), found[owner], shares[owner]) for owner in sorted(found)]
    document = RewardsDocument(
        month=wanted.month,
        pool_microcredits=wanted.pool_microcredits,
        items=[
            RewardShareDocument(
                owner=encode("user", each.owner), weight=each.weight, microcredits=each.microcredits
            )
            for each in made
        ],
    )
    if wanted.dry_run:
        return document
    change = operations.put_rewards(month, made, list(server.ids.take(len(made))), now)
    facts = {"microcredits": str(wanted.pool_microcredits)}
    note = entry(now, who, "rewards.grant", wanted.month, **facts)
    answered = await server.write_once(
        who.user, once, audited(change, [note]), lambda _: document.model_dump_json().encode()
    )
    return RewardsDocument.model_validate_json(answered.body)


async def _contributions(server: Server, month: int) -> list[tuple[int, Contribution]]:
    since, until = span_of(month)
    speeds: dict[NodeId, int] = {}
    for gpu in await server.store.read(operations.measured_gpus()):
        speed = msgspec.json.decode(gpu.measured, type=MeasuredSpeed)
        tflops = max(speed.bf16_gigaflops, speed.fp32_gigaflops) // 1000
        speeds[gpu.node_id] = max(speeds.get(gpu.node_id, 0), tflops)
    verified = {
        row.node_id: row.charged_us
        for row in await server.store.read(operations.verified_use(since, Instant(until)))
    }
    return [
        (
            row.owner_id,
            Contribution(
                row.gpu_us,
                verified.get(row.node_id, 0),
                speeds.get(row.node_id, 1),
                availability_ppm(row.up_us, row.losses, REPAIR_US),
            ),
        )
        for row in await server.store.read(operations.node_use(month))
    ]
