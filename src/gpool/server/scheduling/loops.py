"""The server's periodic loops and their runner. Only the runner catches a loop's exceptions.

The runner calls a loop's `run_once(now)` every `every_s` seconds, and sooner when `wake` is called.

Stored values decay by half each half-life, which readers compute. So only values that differ from their decayed
stored value by more than 2 % are written: a few rows each time, however many tenants there are.
One file because each loop is a few lines, and their runner starts and stops all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from gpool.core.model import SECOND, Availability, Instant, Span
from gpool.core.scheduler.order.fair_share import HALF_LIFE, UsageValues
from gpool.observability.logs import get_logger
from gpool.server import read_only
from gpool.server.actions import audit, policy, quotas
from gpool.server.actions.accounts import removal
from gpool.server.actions.money.sealing import SealLedger
from gpool.server.actions.tasks import deletion as task_deletion
from gpool.server.actions.tasks import direct_uploads, sealed_logs
from gpool.server.actions.tasks.outputs import remove_unless_recorded
from gpool.server.deposits.loop import CreditDeposits
from gpool.server.events.delivery import DeliverNotices
from gpool.server.events.loops import ExpireEvents, NumberEvents, TailEvents, WatchConditions
from gpool.server.nodes.gpu_verifier import GpuVerifier
from gpool.server.nodes.reliability import UpdateReliability
from gpool.server.receipts.loops import IssueReceipts, VestEarnings
from gpool.server.replicas.follow import FollowChanges
from gpool.server.replicas.membership import Membership
from gpool.server.replicas.moving import MoveNodes
from gpool.server.replicas.readings import ExchangeReadings
from gpool.server.scheduling import learning
from gpool.server.scheduling.charging import ChargeTasks
from gpool.server.scheduling.overdue import EndOverdueLeases
from gpool.server.server import Server
from gpool.server.settings import span
from gpool.server.store.operations import nodes, replicas, rules
from gpool.server.store.operations import rules as rules_operations
from gpool.server.store.operations.identity import account_deletion, accounts, expiry, sessions
from gpool.server.store.operations.identity import audit as audit_record
from gpool.server.store.operations.leases import gang_members, leases
from gpool.server.store.operations.leases.leases import NotExpired
from gpool.server.store.operations.tasks import (
    artifacts,
    deletion,
    idempotency,
    progress,
    storage,
    tasks,
)
from gpool.server.store.operations.verification import standings
from gpool.server.store.protocol import Operation
from gpool.server.store.values import LogLine
from gpool.server.verification.loop import VerifyResults
from gpool.server.wakeups import Wake

EVERY_S = 5.0
KEPT = Span(86_400 * SECOND)
_ROWS = 500  # in one write
_LEAST = 10_000  # billionths of the pool
_FRACTION = 50


class StoreUsage:
    name = "usage"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server
        self._written: dict[tuple[str, int], tuple[int, Instant]] = {}
        self._swept = Instant(0)
        self._reign = 0

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if server.picture.is_stale:
            return
        if self._reign != server.replica.reign:  # another leader may have written since
            self._reign, self._written = server.replica.reign, {}
        found = changed(server.picture.state.used(now), self._written, now)
        rows = list(found.items())
        for first in range(0, len(rows), _ROWS):
            await server.write(rules.put_usage(dict(rows[first : first + _ROWS]), now))
        self._written |= {key: (value, now) for key, value in found.items()}
        if now - self._swept > KEPT:
            self._swept = now
            await server.write(rules.forget_usage(Instant(now - KEPT)))
            self._written = {k: v for k, v in self._written.items() if now - v[1] <= KEPT}


def changed(
    used: Mapping[tuple[str, int], int],
    written: Mapping[tuple[str, int], tuple[int, Instant]],
    now: Instant,
) -> UsageValues:
    found: UsageValues = {}
    for key, value in used.items():
        before, at = written.get(key, (0, now))
        decayed = before * 2.0 ** (-(now - at) / HALF_LIFE)
        if abs(value - decayed) > max(_LEAST, value // _FRACTION):
            found[key] = value
    return found


log = get_logger(__name__)

PRUNE_ROWS = 500
"""Rows of a single write of `PruneStore`, so that other writes are not delayed."""

RETAIN_ROWS = 200
"""Tasks that one write of `RetainTasks` shrinks or deletes."""

DAY_S = 86_400

OVERDUE_AFTER = Span(900 * SECOND)
"""Time for a node to release a member after its gang was cancelled or failed. Nothing is saved then: it takes seconds."""

OVERDUE = "it does not release a gang that has ended; connect again when none of its processes runs"

TRAINING_CHECK_S = 3600.0

EVERYWHERE = frozenset({"follow", "move", "readings", "identity", "examine", "lag", "tail"})
"""Loops of every replica: they concern its own connections and memory. The others run in the leader only."""


class Loop(Protocol):
    name: str
    wake: Wake
    every_s: float

    async def run_once(self, now: Instant) -> None: ...


class SchedulePasses:
    """Scheduling passes, one at a time; changes during a pass lead to exactly one more."""

    name = "schedule"

    def __init__(self, server: Server) -> None:
        self.wake = server.picture.changed
        self.every_s = server.settings.tick_s
        self._server = server

    async def run_once(self, now: Instant) -> None:
        with self._server.metrics.passes.time():
            await self._server.scheduler.run_once(now)


class ExpireNodes:
    name = "expire"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = min(server.settings.tick_s, server.settings.ttl_s / 4)
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        for node in server.nodes.expired(now):
            # Checked again for each node: a heartbeat may have come while the last one was written.
            if not server.nodes.is_expired(node, now):
                continue
            server.nodes.disconnect(
                node, "no heartbeat for a whole lease time; connect again", retry=True
            )
            heard_at, term = server.nodes.heard_at[node], server.picture.term
            seen = server.nodes.elsewhere.heartbeat(node)
            recording = await server.write(leases.expire_silent(node, heard_at, term, now, seen))
            if recording is NotExpired.DEPOSED:
                log.warning(
                    "another server took the scheduling term; nothing is expired", node=node
                )
                server.metrics.signals.planner.deposed.inc()
                server.picture.invalidate()
                return
            if recording is NotExpired.HEARD:  # by another server; its leases are not ours to end
                server.nodes.extend_deadline(node, now)
                server.nodes.elsewhere.forget_heartbeat(node)
                continue
            server.metrics.signals.agents.lost.inc()
            server.picture.add_loss(node)
            server.nodes.drop_expired_deadline(node, now)
            server.picture.absorb(recording)
            if node in server.nodes.elsewhere:
                await server.write(replicas.disconnect_silent(node))
                server.nodes.elsewhere.forget(node)
                server.picture.refresh_node(node)
        await self._pause_drained(now)

    async def _pause_drained(self, now: Instant) -> None:
        drained = [
            id_
            for id_, entry in self._server.picture.state.nodes.items()
            if entry.node is not None
            and entry.node.availability is Availability.DRAINING
            and not entry.lines
        ]
        for id_ in drained:
            row = await self._server.write(
                nodes.set_availability(id_, None, Availability.PAUSED, now)
            )
            if row is not None:
                self._server.picture.node_changed(row.node)


class BlockOverdueNodes:
    name = "overdue"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = 60.0
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        for node in await server.store.read(gang_members.overdue(Instant(now - OVERDUE_AFTER))):
            if server.nodes.block(node):
                log.warning("node blocked", node=node, why=OVERDUE)
            server.nodes.disconnect(node, OVERDUE, retry=True)


class PruneStore:
    name = "prune"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = server.settings.prune_s
        self._server = server
        self._shard = 0

    async def run_once(self, now: Instant) -> None:
        server, settings = self._server, self._server.settings
        server.picture.drop_unused_specs()
        await quotas.refresh(server)  # another replica may have changed them
        await policy.refresh(server)
        before = Instant(now - span(settings.keep_keys_s))
        while await server.write(idempotency.forget_keys(before, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass
        await self._seal_logs(now)
        before = Instant(now - span(settings.keep_checkpoints_s))
        while await server.write(progress.forget_checkpoints(before, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass
        await self._remove_unreferenced(now)
        before = Instant(now - span(settings.keep_unreferenced_s))
        server.blobs.remove_stale_parts(now, span(settings.keep_unreferenced_s))
        while stale := await server.write(storage.forget_uploads(before, PRUNE_ROWS)):
            await direct_uploads.discard(server, stale)
        over = await server.write(storage.forget_uploads_of_ended_leases())
        for upload in over:
            server.blobs.remove_part(upload.sha256, upload.uploader)
        await direct_uploads.discard(server, over)
        await self._sweep(now)

    async def _seal_logs(self, now: Instant) -> None:
        server = self._server
        before = Instant(now - span(server.settings.seal_logs_after_s))
        for task in await server.store.read(progress.finished_with_logs(before, PRUNE_ROWS)):
            view = await server.store.read(tasks.task(task, None))
            if view is None or not view.row.status.is_final or view.row.holding:
                continue
            lines: list[LogLine] = []
            while chunk := await server.store.read(
                progress.logs(task, lines[-1].cursor if lines else 0, PRUNE_ROWS)
            ):
                lines += chunk
            data = await asyncio.to_thread(sealed_logs.sealed, lines)
            stored = await server.blobs.put_bytes(data)
            recorded = artifacts.StoredBytes(stored.object, stored.file_key)
            await server.write(progress.seal_logs(task, stored.sha256, len(data), now, recorded))
            await remove_unless_recorded(server, stored)

    async def _remove_unreferenced(self, now: Instant) -> None:
        server = self._server
        before = Instant(now - span(server.settings.keep_unreferenced_s))
        while found := await server.store.read(artifacts.unreferenced(before, PRUNE_ROWS)):
            for key in await server.write(artifacts.forget_artifacts(found, before)):
                await server.blobs.remove(key)
            if len(found) < PRUNE_ROWS:
                return

    async def _sweep(self, now: Instant) -> None:
        """Check one of 256 shards of the folder and the object store for objects and uploads that no row names."""
        server = self._server
        if server.blobs.multipart is not None:
            await server.blobs.multipart.probe()
        before = Instant(now - span(server.settings.keep_unreferenced_s))
        await direct_uploads.sweep(server, f"{self._shard:02x}", before)
        self._shard = (self._shard + 1) % 256


class RetainTasks:
    """Shrinks and deletes expired tasks, and finishes the deletion of accounts, in bounded batches."""

    name = "retention"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = server.settings.prune_s
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server, settings = self._server, self._server.settings
        if settings.keep_tasks_days:
            before = Instant(now - span(settings.keep_tasks_days * DAY_S))
            await self._all(lambda: deletion.delete_expired(before, RETAIN_ROWS))
        if settings.keep_task_data_days:
            old = Instant(now - span(settings.keep_task_data_days * DAY_S))
            await self._all(lambda: deletion.shrink_expired(old, now, RETAIN_ROWS))
        for user in await server.store.read(account_deletion.deleted_accounts(RETAIN_ROWS)):
            await removal.purge(server, user)
        await removal.destroy_left_keys(server)
        await server.write(expiry.forget_deleted_teams())
        await server.write(standings.forget_standings(now))
        await self._expire_records(now)

    async def _expire_records(self, now: Instant) -> None:
        server, settings = self._server, self._server.settings
        if settings.keep_credentials_days:
            before = Instant(now - span(settings.keep_credentials_days * DAY_S))
            while await server.write(expiry.forget_credentials(before, PRUNE_ROWS)) >= PRUNE_ROWS:
                pass
        if settings.keep_audit_days:
            before = Instant(now - span(settings.keep_audit_days * DAY_S))
            expire = audit_record.forget_entries
            while await server.write(expire(before, now, PRUNE_ROWS)) >= PRUNE_ROWS:
                pass

    async def _all(self, expire: Callable[[], Operation[deletion.DeletedTasks]]) -> None:
        while (found := await self._server.write(expire())).tasks:
            await task_deletion.remove_files(self._server, found.artifacts)
            await _yield_to_others()


class RotateKeys:
    name = "keys"

    def __init__(self, server: Server) -> None:
        self.wake = server.sealer.wake
        self.every_s = server.settings.prune_s
        self._server = server

    async def run_once(self, now: Instant) -> None:  # noqa: ARG002 - a loop's signature
        sealer = self._server.sealer
        await sealer.retire_worn()
        await sealer.rewrap()
        await sealer.rekey(_yield_to_others)


async def _yield_to_others() -> None:
    await asyncio.sleep(0)


class MaintainIdentity:
    name = "identity"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = min(server.settings.prune_s, max(server.settings.signing_key_lead_s, 1) / 2)
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        await server.identity.signing.look(now)
        refused = server.identity.refusals.take(now)
        if refused:
            await audit.note(server, *refused)
        used = server.credentials.used_keys()
        if used:
            await server.write(audit.keys_used(used))
        while await server.write(accounts.forget_nonces(now, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass
        before = Instant(now - span(server.settings.keep_keys_s))
        while await server.write(sessions.forget_sessions(before, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass


class TrainPricing:
    name = "learn"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._requests = server.learning
        self.wake = self._requests.wake
        self.every_s = min(TRAINING_CHECK_S, max(1.0, server.settings.learn_every_s))
        learning.set_metrics(server.metrics, server.picture.policy.rules.learnt)

    async def run_once(self, now: Instant) -> None:
        server, is_requested = self._server, self._requests.take()
        known = server.picture.policy.rules.learnt
        every = server.settings.learn_every_s
        if not is_requested and (not every or (known is not None and now - known.at < span(every))):
            return
        found = await learning.trained(server.picture.state, server.store, now)
        if found is None:
            if is_requested:
                log.info("too few GPU tasks to train the slot pricing on")
            return
        await server.write(rules_operations.put_learnt(found, now))
        rules = await server.store.read(rules_operations.rules())
        server.picture.use_rules(rules, server.now)
        learning.set_metrics(server.metrics, found)
        log.info("slot pricing trained", result=learning.sentence(found))


class VerifyGpus:
    name = "examine"

    def __init__(self, server: Server, verifier: GpuVerifier) -> None:
        self.wake = verifier.wake
        self.every_s = server.settings.tick_s
        self._verifier = verifier

    async def run_once(self, now: Instant) -> None:
        await self._verifier.run_once(now)


class LoopRunner:
    """An exception of a loop is logged and counted; the loop goes on at its next tick."""

    def __init__(self, server: Server, *loops: Loop) -> None:
        self._server = server
        self._loops = loops
        for loop in loops:
            server.metrics.loop_faults.labels(loop.name)  # exported as 0
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._running = [
            asyncio.create_task(self._run(loop), name=f"gpool-{loop.name}") for loop in self._loops
        ]

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = []

    def is_due(self, loop: Loop) -> bool:
        if self._server.read_only.is_on and loop.name not in read_only.LOOPS:
            return False
        return self._server.replica.leads or loop.name in EVERYWHERE

    async def _run(self, loop: Loop) -> None:
        while True:
            try:
                if self.is_due(loop):
                    await loop.run_once(self._server.now)
            except Exception:
                log.exception("loop failed; it goes on at the next tick", loop=loop.name)
                self._server.metrics.loop_faults.labels(loop.name).inc()
                self._server.picture.invalidate()
                await Wake().wait(loop.every_s)
            await loop.wake.wait(loop.every_s)


def all_loops(server: Server) -> tuple[Loop, ...]:
    loops: tuple[Loop, ...] = (
        SchedulePasses(server),
        ExpireNodes(server),
        PruneStore(server),
        RetainTasks(server),
        RotateKeys(server),
        StoreUsage(server),
        UpdateReliability(server),
        BlockOverdueNodes(server),
        EndOverdueLeases(server),
        TrainPricing(server),
        VerifyResults(server),
    )
    if server.settings.prices or server.sign_ins is not None:
        loops = (*loops, ChargeTasks(server, server.scheduler.prices))
    if isinstance(server.replica, Membership):
        loops = (
            *loops,
            FollowChanges(server, server.replica),
            MoveNodes(server, server.replica),
            ExchangeReadings(server, server.replica),
        )
    if server.examiner is not None:
        loops = (*loops, VerifyGpus(server, server.examiner))
    if server.sign_ins is None:
        return loops
    terms = server.settings.deposit_terms(server.settings.chain_id)
    if terms is not None:
        loops = (*loops, CreditDeposits(server, terms))
    return (
        *loops,
        MaintainIdentity(server),
        SealLedger(server),
        IssueReceipts(server),
        VestEarnings(server),
        NumberEvents(server),
        TailEvents(server),
        WatchConditions(server),
        ExpireEvents(server),
        DeliverNotices(server),
    )
