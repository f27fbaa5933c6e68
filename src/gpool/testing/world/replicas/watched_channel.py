"""Channel of a simulated replica that fails the run if its agent lacks a lease that was never sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpool.core.ids import TaskId
from gpool.core.model import Instant, TaskSpec
from gpool.server.nodes.connection import NodeChannel
from gpool.server.nodes.registry import OpenSecrets
from gpool.wire.frames import Hello, Hold, Line, ServerFrame, Stop


class WatchedChannel(NodeChannel):
    """Fails the run if an agent does not know of a lease that this connection never sent."""

    fail: Callable[[str], None]
    known: set[TaskId]

    async def greet(self, hello: Hello) -> None:
        self.known = {TaskId(hold.task) for hold in hello.holds}
        self._send = _noting(self._send, self.known)
        await super().greet(hello)

    def _send_grants(
        self, lines: list[Line], spec_of: Callable[[int], TaskSpec | None], secrets: OpenSecrets
    ) -> None:
        self.known.update(TaskId(lease.task) for line in lines for lease in line.leases)
        super()._send_grants(lines, spec_of, secrets)

    def _forgotten(self, stated: Iterable[Hold], now: Instant) -> set[TaskId]:
        found = super()._forgotten(stated, now)
        if unsent := found - self.known:
            self.fail(f"node {self.node} was not sent leases of its own: {sorted(unsent)}")
        return found


def _noting(
    send: Callable[[ServerFrame], None], known: set[TaskId]
) -> Callable[[ServerFrame], None]:
    """Add stopped leases to the known ones: a lease cancelled before it was sent is only stopped."""

    def noted(frame: ServerFrame) -> None:
        if isinstance(frame, Stop):
            known.update(TaskId(hold.task) for hold in frame.holds)
        send(frame)

    return noted
