"""The loop that starts siblings of verified tasks, replaces those without an answer, and writes verdicts.

Everything it knows is read from the store at each tick, so that a restart, or another leader, continues where it was.
"""

from __future__ import annotations

from gpool.core.ids import BatchId, SpecId, TaskId
from gpool.core.model import Instant, TaskStatus
from gpool.observability.logs import get_logger
from gpool.server.server import Server
from gpool.server.store.operations.verification import siblings as operations
from gpool.server.store.operations.verification import standings, verdicts, withdrawals
from gpool.server.verification.check_rounds import CheckRound
from gpool.server.verification.comparison_rounds import ComparisonRound
from gpool.server.verification.sibling_rounds import Round
from gpool.server.wakeups import Wake

log = get_logger(__name__)

OF_EACH_USER = 64
"""Verifications of one user that are under way at once, so that nobody's siblings fill the queue."""

AT_ONCE = 2000
"""Verifications that one tick examines."""


def _kind_of(parent: operations.OpenVerification) -> type[Round]:
    if parent.spec.check_sha256:
        return CheckRound
    return ComparisonRound if parent.spec.comparator_sha256 else Round


class VerifyResults:
    name = "verify"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = server.settings.tick_s
        self._server = server

    async def run_once(self, now: Instant) -> None:
        server = self._server
        if server.picture.is_stale:
            return
        await self._run_again(now)
        if await server.store.read(verdicts.held_charges()):
            await server.write(verdicts.settle(server.picture.term, now))
        found = await server.store.read(operations.open_verifications(OF_EACH_USER, AT_ONCE))
        if not found:
            return
        ended = [one.task_id for one in found if one.status != TaskStatus.QUEUED]
        if ended:
            await server.write(verdicts.settle_ended(ended, server.picture.term, now))
        waiting = [one for one in found if one.status == TaskStatus.QUEUED]
        rows = await server.store.read(operations.siblings_of([one.task_id for one in waiting]))
        banned = await server.store.read(standings.banned_nodes(now))
        for parent in waiting:
            if server.picture.is_stale:
                return  # the state is rebuilt before more is drawn from it
            await _kind_of(parent)(
                server, parent, rows.get(parent.task_id, []), banned, now
            ).advance()

    async def _run_again(self, now: Instant) -> None:
        """Submit tasks again whose results were withdrawn, because their node was caught."""
        server = self._server
        for result in await server.store.read(withdrawals.withdrawn_results(AT_ONCE)):
            ids, term = server.ids, server.picture.term
            task, batch, spec = TaskId(ids.next()), BatchId(ids.next()), SpecId(ids.next())
            written = await server.write(withdrawals.rerun(result, task, batch, spec, term, now))
            if written is not None:
                submission, submitted = written
                server.picture.add_submission(submitted, submission)
                server.picture.changed.call()
            server.hub.publish((result.task_id,))
            log.warning("a result was withdrawn: its node was caught", task=result.task_id)
