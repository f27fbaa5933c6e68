"""Anchors of the audit record in the server's log: number and hash of its newest entry.

Whoever can write to the database can rewrite the whole record, but not lines that were shipped elsewhere.
"""

from __future__ import annotations

from gpool.core.model import Instant
from gpool.observability.logs import get_logger
from gpool.server.identity.audit import AuditAnchor
from gpool.server.server import Server
from gpool.server.store.operations.identity import audit
from gpool.server.wakeups import Wake

log = get_logger(__name__)


class LogAuditAnchors:
    """Logs the head of the record when it has changed, at the start and every `audit_anchor_s`."""

    name = "anchors"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = server.settings.audit_anchor_s
        self._server = server
        self._last: AuditAnchor | None = None

    async def run_once(self, now: Instant) -> None:  # noqa: ARG002 - a loop's signature
        head = await self._server.store.read(audit.head())
        if head is not None and head != self._last:
            log.info("audit anchor", anchor=f"{head.sequence}:{head.hash.hex()}")
            self._last = head
