"""Ways to break gangs on purpose, to see that the judge of `bench.gangs` notices each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from gpool.core.model import Node
from gpool.core.scheduler.state.events import Event, NodeChanged, TasksLeased, TasksQueued
from gpool.server.scheduling.picture import StatePicture
from gpool.server.store.protocol import Operation, Relation, Row, Statement

T = TypeVar("T")


class ForgetsMembers(StatePicture):
    """Counts a gang's first node only as taken."""

    def fold(self, event: Event) -> None:
        super().fold(replace(event, members=()) if isinstance(event, TasksLeased) else event)


class OneSite(StatePicture):
    """Takes all nodes for neighbours."""

    def effective_node(self, node: Node) -> Node:
        node = super().effective_node(node)
        offer = replace(node.offer, site="here", address="10.0.0.1", gang_port=7000)
        return replace(node, offer=offer)

    def fold(self, event: Event) -> None:
        if isinstance(event, NodeChanged):
            event = NodeChanged(self.effective_node(event.node))
        super().fold(event)


class Forgets(StatePicture):
    """Does not take back to its queue what comes back."""

    def fold(self, event: Event) -> None:
        if not (isinstance(event, TasksQueued) and any(task.epoch for task in event.tasks)):
            super().fold(event)


def without_last_member(operation: Operation[T]) -> Operation[T]:
    """Writes a gang without one of its members."""
    answer: list[Row] | None = None
    try:
        while True:
            statement = operation.send(answer)  # type: ignore[arg-type]
            if statement.sql.startswith("INSERT INTO members"):
                statement = _shortened(statement)
            answer = yield statement
    except StopIteration as stop:
        value: T = stop.value
        return value


def _shortened(statement: Statement) -> Statement:
    kept: dict[str, Relation] = {
        name: Relation(relation.columns, relation.rows[:-1])
        for name, relation in statement.relations.items()
    }
    return Statement(statement.sql, statement.parameters, kept)


FLAWED_PICTURES: dict[str, type[StatePicture]] = {
    "forgets_members": ForgetsMembers,
    "one_site": OneSite,
    "requeue_not_folded": Forgets,
}
UNCOMPARED = ("forgets_members", "one_site")
"""Their states are wrong at once: what is looked at is what comes of it in the store."""

REWRITES: dict[str, Any] = {"one_member_not_written": without_last_member}
FLAWS = (*FLAWED_PICTURES, *REWRITES, "fence_off", "expires_early", "silent_stop")
