"""Looks for nodes that do not let go of a gang that is over, and stops speaking to them. It ends nothing itself.

A gang's slices are released together, when its last node has let go: one that never does, its processes stuck in the kernel or
its owner ill-willed, would keep those of all the others. Nothing may be taken from a node that is heard from. So it is not
listened to any more; when its lease time is over it has killed what it runs, or ought to have, and is given up as any silent
node is.
"""

from __future__ import annotations

import logging

from gpool.core.model import SECOND, Instant, Span
from gpool.server.server import Server
from gpool.server.store.operations.gangs import members
from gpool.server.wakeups import Wake

log = logging.getLogger(__name__)

EVERY_S = 60.0
PATIENCE = Span(900 * SECOND)
"""After the gang was cancelled or called off. Nothing is saved then, so a node that works takes seconds."""
WHY = "it holds on to a gang that is over; say hello again when nothing of it runs"


class Overdue:
    """A loop."""

    name = "overdue"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server

    async def run_once(self, now: Instant) -> None:
        scheduler = self._server.scheduler
        for node in await self._server.store.read(members.overdue(Instant(now - PATIENCE))):
            if node not in scheduler.rests.shunned:
                log.warning("node %s %s", node, WHY)
                scheduler.rests.shunned.add(node)
            scheduler.disconnect(node, WHY, retry=True)
