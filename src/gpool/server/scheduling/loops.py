"""The server's loops. Each does its work in `run_once(now)`; the ticker wakes it, and only the ticker survives its faults."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from gpool.core.model import Availability, Instant
from gpool.server.actions.operators import audit, policy, quotas
from gpool.server.gpu_verification.verifier import Examiner
from gpool.server.nodes.overdue_leases import Overdue
from gpool.server.nodes.reliability import Merits
from gpool.server.scheduling.pricing_training import Learn
from gpool.server.scheduling.usage import KeepUsage
from gpool.server.server import Server
from gpool.server.settings import span
from gpool.server.store.operations.identity import accounts, sessions
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.nodes import nodes
from gpool.server.store.operations.tasks import artifacts, checkpoints, idempotency, logs, tasks
from gpool.server.store.values import LogLine
from gpool.server.wakeups import Wake

log = logging.getLogger(__name__)

PRUNE_ROWS = 500
"""Rows a single write of `prune` may touch, so that others get their turn."""


class Loop(Protocol):
    name: str
    wake: Wake
    every_s: float

    async def run_once(self, now: Instant) -> None: ...


class Schedule:
    """Passes of the scheduler: one at a time; changes during a pass lead to exactly one more."""

    name = "schedule"

    def __init__(self, server: Server) -> None:
        self.wake = server.scheduler.wake
        self.every_s = server.settings.tick_s
        self._server = server

    async def run_once(self, now: Instant) -> None:
        with self._server.metrics.passes.time():
            await self._server.scheduler.run_once(now)


class Expire:
    """Gives up nodes that were silent for a whole lease time, and pauses drained ones."""

    name = "expire"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = min(server.settings.tick_s, server.settings.ttl_s / 4)
        self._server = server

    async def run_once(self, now: Instant) -> None:
        scheduler = self._server.scheduler
        for node in scheduler.silent(now):
            # Checked again for each: a beat may have come while the last one was written.
            if not scheduler.is_silent(node, now):
                continue
            scheduler.disconnect(
                node, "no beat for a whole lease time; say hello again", retry=True
            )
            recording = await self._server.write(leases.expire(node, now))
            scheduler.note_lost(node)
            if scheduler.is_silent(node, now):
                del scheduler.deadlines[node]
            scheduler.absorb(recording)
        await self._pause_drained(now)

    async def _pause_drained(self, now: Instant) -> None:
        drained = [
            id_
            for id_, entry in self._server.scheduler.state.nodes.items()
            if entry.node is not None
            and entry.node.availability is Availability.DRAINING
            and not entry.lines
        ]
        for id_ in drained:
            row = await self._server.write(
                nodes.set_availability(id_, None, Availability.PAUSED, now)
            )
            if row is not None:
                self._server.scheduler.node_changed(row.node)


class Prune:
    """Forgets what nobody needs: old idempotency keys, logs as rows, checkpoints of what has ended, unreferenced
    artifacts, abandoned uploads."""

    name = "prune"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = server.settings.prune_s
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server, settings = self._server, self._server.settings
        before = Instant(now - span(settings.keep_keys_s))
        while await server.write(idempotency.forget_keys(before, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass
        await self._seal_logs(now)
        before = Instant(now - span(settings.keep_checkpoints_s))
        while await server.write(checkpoints.forget_checkpoints(before, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass
        await self._remove_unreferenced(now)
        server.blobs.remove_stale_parts(now, span(settings.keep_unreferenced_s))
        server.scheduler.tidy()
        await quotas.refresh(server)  # another replica may have changed them
        await policy.refresh(server)

    async def _seal_logs(self, now: Instant) -> None:
        server = self._server
        before = Instant(now - span(server.settings.seal_logs_after_s))
        for task in await server.store.read(logs.finished_with_logs(before, PRUNE_ROWS)):
            view = await server.store.read(tasks.task(task, None))
            if view is None or not view.row.status.is_final or view.row.holding:
                continue
            lines: list[LogLine] = []
            while chunk := await server.store.read(
                logs.logs(task, lines[-1].cursor if lines else 0, PRUNE_ROWS)
            ):
                lines += chunk
            data = msgspec.json.Encoder().encode_lines(lines)
            sha256 = await server.blobs.put_bytes(data)
            with server.blobs.pinned(sha256):
                await server.write(logs.seal_logs(task, sha256, len(data), now))

    async def _remove_unreferenced(self, now: Instant) -> None:
        server = self._server
        before = Instant(now - span(server.settings.keep_unreferenced_s))
        while found := await server.store.read(artifacts.unreferenced(before, PRUNE_ROWS)):
            for sha256 in await server.write(artifacts.forget_artifacts(found, before)):
                server.blobs.remove(sha256)
            if len(found) < PRUNE_ROWS:
                return


class Keys:
    """Takes up what was done to the keys, and moves fields away from retired ones: woken by a rotation."""

    name = "keys"

    def __init__(self, server: Server) -> None:
        self.wake = server.sealer.wake
        self.every_s = server.settings.prune_s
        self._server = server

    async def run_once(self, now: Instant) -> None:  # noqa: ARG002 - a loop's shape
        sealer = self._server.sealer
        await sealer.rewrap()
        await sealer.rekey(_let_others_go)


async def _let_others_go() -> None:
    await asyncio.sleep(0)


class Identity:
    """Keeps what signing in needs in order: signing keys, used API keys, old nonces and sessions."""

    name = "identity"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = min(server.settings.prune_s, max(server.settings.signing_key_lead_s, 1) / 2)
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        await server.identity.signing.look(now)
        used = server.credentials.used_keys()
        if used:
            await server.write(audit.keys_used(used))
        while await server.write(accounts.forget_nonces(now, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass
        before = Instant(now - span(server.settings.keep_keys_s))
        while await server.write(sessions.forget_sessions(before, PRUNE_ROWS)) >= PRUNE_ROWS:
            pass


class Examine:
    """Trials of GPUs: begun, timed, judged."""

    name = "examine"

    def __init__(self, server: Server, examiner: Examiner) -> None:
        self.wake = examiner.wake
        self.every_s = server.settings.tick_s
        self._examiner = examiner

    async def run_once(self, now: Instant) -> None:
        await self._examiner.run_once(now)


class Ticker:
    """The only place where a loop's fault is caught: it is logged, counted, and the loop goes on at its next tick."""

    def __init__(self, server: Server, *loops: Loop) -> None:
        self._server = server
        self._loops = loops
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._running = [
            asyncio.create_task(self._keep(loop), name=f"gpool-{loop.name}") for loop in self._loops
        ]

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = []

    async def _keep(self, loop: Loop) -> None:
        while True:
            try:
                await loop.run_once(self._server.now)
            except Exception:
                log.exception("loop %s failed; it goes on at the next tick", loop.name)
                self._server.metrics.loop_faults.labels(loop.name).inc()
                self._server.scheduler.doubt()
                await Wake().wait(loop.every_s)
            await loop.wake.wait(loop.every_s)


def all_loops(server: Server) -> tuple[Loop, ...]:
    loops: tuple[Loop, ...] = (
        Schedule(server),
        Expire(server),
        Prune(server),
        Keys(server),
        KeepUsage(server),
        Merits(server),
        Overdue(server),
        Learn(server),
    )
    if server.examiner is not None:
        loops = (*loops, Examine(server, server.examiner))
    return loops if server.sign_ins is None else (*loops, Identity(server))
