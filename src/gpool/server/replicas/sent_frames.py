"""Frames that a replica has sent because the change feed named their leases. Kept in memory; a new connection starts anew.

A lease is named by each of its changes, and must be granted, cancelled and preempted once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import TaskStatus
from gpool.server.server import Server
from gpool.server.store.operations.replicas import ChangedTask
from gpool.wire.frames import Hold

Sent = tuple[int, int, Literal["grant", "cancel", "preempt"]]
"""Task, epoch and kind of the frame."""


class SentFrames:
    """Leases granted and stopped because of the feed, so that a lease named again is not sent again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._sent: set[Sent] = set()

    def forget(self) -> None:
        self._sent.clear()

    def unsent_grants(self, held: Iterable[ChangedTask]) -> list[ChangedTask]:
        self._drop_ended()
        return [
            row
            for row in held
            if row.status == TaskStatus.LEASED and self._is_new((row.id, row.epoch, "grant"))
        ]

    def unsent_cancels(self, held: Iterable[ChangedTask]) -> list[tuple[NodeId, Hold]]:
        return [
            _hold(row)
            for row in held
            if row.status == TaskStatus.CANCELLED and self._is_new((row.id, row.epoch, "cancel"))
        ]

    def unsent_preemptions(self, held: Iterable[ChangedTask]) -> list[tuple[NodeId, Hold]]:
        return [
            _hold(row)
            for row in held
            if row.preempting
            and row.status != TaskStatus.CANCELLED
            and self._is_new((row.id, row.epoch, "preempt"))
        ]

    def _is_new(self, sent: Sent) -> bool:
        is_new = sent not in self._sent
        self._sent.add(sent)
        return is_new

    def _drop_ended(self) -> None:
        held = self._server.picture.state.held
        if len(self._sent) > 1000 + 4 * len(held):
            self._sent = {each for each in self._sent if TaskId(each[0]) in held}


def _hold(row: ChangedTask) -> tuple[NodeId, Hold]:
    assert row.node_id is not None
    return row.node_id, Hold(row.id, row.epoch)
