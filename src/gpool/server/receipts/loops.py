"""Loops of the leader: `receipts` issues a receipt for each posted charge, `vesting` pays owners when the window is over."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpool.core.errors import Conflict
from gpool.core.ids import encode
from gpool.core.model import SECOND, Instant
from gpool.core.money.transfers import month_of
from gpool.observability.logs import get_logger
from gpool.server.actions.audit import audited
from gpool.server.identity.audit import AuditEntry
from gpool.server.receipts.signer import CurrentReceiptKey
from gpool.server.server import Server
from gpool.server.store.generated_rows import ReceiptsRecord
from gpool.server.store.operations.money import receipts, vesting
from gpool.server.store.operations.money.receipts import IssuableCharge, IssuedReceipts
from gpool.server.wakeups import Wake
from gpool.transfer.node_proofs import public_from
from gpool.wallet.receipt_keys import ReceiptGpu, ReceiptWork, SignedWork, key_id
from gpool.wallet.receipts import ReceiptCharge, issue

EVERY_S = 10.0
ROWS = 500
"""Receipts or vested charges of one write."""
GRACE = 3600 * SECOND
"""Time after the end of a lease until its unsigned charge returns to the payer."""
KEPT = 86_400 * SECOND
"""Time for which a signature without a charge is kept."""

log = get_logger(__name__)


class IssueReceipts:
    """An idle pool costs two indexed reads in each interval. A node's invalid signature never came here."""

    name = "receipts"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server
        self._has_key = not server.settings.prices

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if not self._has_key:  # with prices on, users can fetch the key before the first receipt
            await self._key(now)
            self._has_key = True
        if not await server.store.read(receipts.has_issuable()):
            return
        key = await self._key(now)
        while True:
            found = await server.store.read(receipts.issuable(ROWS))
            if not found:
                break
            good = [row for row in found if is_signed(key.pool, row)]
            if len(good) < len(found):
                await self._reject([row for row in found if row not in good])
            ids = server.ids.take(len(good))
            rows = [issued(key, row, id_, now) for row, id_ in zip(good, ids, strict=True)]
            window = int(server.settings.vest_hours * 3600 * SECOND)
            try:
                await server.write(receipts.put_receipts(IssuedReceipts(key.key.id, rows, window)))
            except Conflict:
                log.info("receipt key replaced while receipts were issued")
                break

    async def _reject(self, rows: Sequence[IssuableCharge]) -> None:
        for row in rows:
            log.warning(
                "wrong signature of a lease's work",
                node=row.node_id,
                task=row.task_id,
                epoch=row.epoch,
            )
        leases = [(row.task_id, row.epoch, row.node_id) for row in rows]
        await self._server.write(receipts.reject_signatures(leases))

    async def _key(self, now: Instant) -> CurrentReceiptKey:
        """Current receipt key; the first one is created here."""
        signer = self._server.identity.receipts
        found = await signer.current()
        if found is None:
            rotation = await signer.rotation(now)
            new = key_id(rotation.history.keys[-1].public)
            note = AuditEntry(0, now, "", "receipt_keys.rotate", new, "ok", "")
            await self._server.write(audited(rotation.operation, [note]))
            found = await signer.current()
        assert found is not None, "a receipt key was just created"
        return found


def work_of(pool: str, row: IssuableCharge) -> ReceiptWork:
    return ReceiptWork(
        pool,
        encode("task", row.task_id),
        row.epoch,
        encode("node", row.node_id),
        msgspec.json.decode(row.gpus, type=tuple[ReceiptGpu, ...]),
        row.result,
    )


def is_signed(pool: str, row: IssuableCharge) -> bool:
    """Whether the node signed this work, on the GPUs that were charged."""
    public = public_from(row.node_key)
    if public is None:
        return False
    work = work_of(pool, row)
    charged = [each["model"][:100] for each in msgspec.json.decode(row.charged_gpus)]
    if [gpu.model for gpu in work.gpus] != charged:
        return False
    return _signed(work, public, row).is_genuine()


def _signed(work: ReceiptWork, public: bytes, row: IssuableCharge) -> SignedWork:
    return SignedWork(work, public.hex(), row.signature.hex(), (row.path or b"").hex())


def issued(key: CurrentReceiptKey, row: IssuableCharge, id_: int, now: Instant) -> ReceiptsRecord:
    """Receipt of one charge, signed now."""
    issued_ms = max(_ms(now), _ms(row.ended_at), key.from_ms)
    work, public = work_of(key.pool, row), public_from(row.node_key)
    assert public is not None, "the signature was verified"
    started_at = row.ended_at if row.started_at is None else row.started_at
    charge = ReceiptCharge(
        payer=encode("account", row.payer_id),
        owner=encode("account", row.owner_id),
        transfer=row.transfer_id,
        end_reason=row.reason,
        started_ms=_ms(started_at),
        ended_ms=_ms(row.ended_at),
        charged_ms=min(_ms(Instant(row.charged_us)), _ms(row.ended_at) - _ms(started_at)),
        price_per_hour=row.rate,
        amount=row.microcredits,
        fee=row.fee,
        issued_ms=issued_ms,
    )
    signed = _signed(work, public, row)
    return ReceiptsRecord(
        id_,
        row.task_id,
        row.epoch,
        row.node_id,
        row.payer_id,
        row.owner_id,
        month_of(now),
        Instant(issued_ms * 1000),
        issue(signed, charge, key.key).to_bytes(),
    )


def _ms(at: Instant) -> int:
    return at * 1000 // SECOND


class VestEarnings:
    """An idle pool costs a few indexed reads in each interval. Charges without a receipt return to their payers."""

    name = "vesting"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if await server.store.read(vesting.has_vested(now)):
            while (
                await server.write(vesting.vest(now, ROWS, list(server.ids.take(ROWS + 1)))) >= ROWS
            ):
                pass
        if await server.store.read(receipts.has_issuable()):
            grace = Instant(now - GRACE)
            while await server.write(vesting.forfeit_unsigned(grace, now, ROWS)) >= ROWS:
                pass
        if await server.store.read(receipts.has_signatures(Instant(now - KEPT))):
            while await server.write(receipts.forget_signatures(Instant(now - KEPT), ROWS)) >= ROWS:
                pass
