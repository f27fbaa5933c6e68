"""What becomes of a task that could not be started, and whose fault that was. Arithmetic over what was told; it writes nothing.

**The task.** That it did not start is no failure of its own: it waits again, and goes where it was not tried yet, where
that would do (`Shape.avoids`). But there is an end to it: a task that starts nowhere fails with what the last node said. What
nodes say of themselves decides how soon: where a node says that the fault is its own, the task is hardly suspect.

**The node.** Consumers can bring about that their tasks do not start (an image that does not exist), so that alone says
nothing against a node: whoever wanted a provider out of the pool would only have to send such tasks. Two things do:

- its own word: it looked, and cannot start even the simplest thing itself;
- tasks of `ENOUGH` different users that could not be started there and began elsewhere. What starts nowhere is never held
  against any node, and one user's tasks never are by themselves, whatever they are made of.

A node that starts anything is no black hole: what was held against it is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.lifecycle import Move
from gpool.core.model import EndReason, Fault

MAX_UNSTARTED = 3
"""Tries of a task that could not be started, where no node says that the fault was its own; its retries are on top."""

MAX_BY_NODE = 5
"""The same of all tries."""

ENOUGH = 2
"""Users whose tasks could not be started on a node and began elsewhere."""


@dataclass(frozen=True, slots=True)
class Unstarted:
    """How often a task could not be started so far: `by_node` where the node said that this was its own fault."""

    unclear: int = 0
    by_node: int = 0

    def and_one(self, fault: Fault) -> Unstarted:
        if fault is Fault.UNCLEAR:
            return Unstarted(self.unclear + 1, self.by_node)
        return Unstarted(self.unclear, self.by_node + 1)

    @property
    def times(self) -> int:
        return self.unclear + self.by_node


def unstarted_move(tries: Unstarted, retries: int) -> Move:
    """Whether it waits again; `tries` counts this one too."""
    if tries.unclear >= MAX_UNSTARTED + retries or tries.times >= MAX_BY_NODE + retries:
        return Move.FAILED
    return Move.REQUEUED


def archived_as(fault: Fault) -> EndReason:
    """What the story of the task says of such an attempt."""
    return EndReason.SANDBOX_FAILED if fault is Fault.UNCLEAR else EndReason.NODE_FAILED


def given_up(said: str, tries: Unstarted) -> str:
    """What is told of a task that starts nowhere: first what the last node said."""
    if tries.times < 2:
        return said
    return f"{said} (it was tried {tries.times} times and could not be started)".lstrip()


class Evidence:
    """What speaks against nodes. Folded from what was committed, in its order; it forgets a task with its end."""

    def __init__(self) -> None:
        self._tried: dict[
            TaskId, tuple[UserId, set[NodeId]]
        ] = {}  # where they could not be started
        self._against: dict[NodeId, set[UserId]] = {}

    @property
    def is_any(self) -> bool:
        return bool(self._tried or self._against)

    @property
    def against(self) -> Mapping[NodeId, Collection[UserId]]:
        """Whose tasks could not be started there and began elsewhere."""
        return self._against

    def failed(self, task: TaskId, user: UserId, node: NodeId, fault: Fault) -> bool:
        """It could not be started there; whether that alone is the node's fault."""
        if fault is Fault.NODE:
            return True
        if fault is Fault.UNCLEAR:
            self._tried.setdefault(task, (user, set()))[1].add(node)
        return False

    def began(self, task: TaskId, nodes: Collection[NodeId]) -> list[NodeId]:
        """It runs there. The nodes whose fault it now seems that it, and others, did not run before."""
        for node in self._against.keys() & set(nodes):
            del self._against[node]
        user, tried = self._tried.pop(task, (None, set[NodeId]()))
        if user is None:
            return []
        found = []
        for node in sorted(tried.difference(nodes)):
            users = self._against.setdefault(node, set())
            users.add(user)
            if len(users) >= ENOUGH:
                found.append(node)
                del self._against[node]
        return found

    def ended(self, tasks: Collection[TaskId]) -> None:
        """Without having begun: it says nothing against anybody."""
        if self._tried:
            for task in tasks:
                self._tried.pop(task, None)

    def forget(self, node: NodeId) -> None:
        self._against.pop(node, None)
        for _, tried in self._tried.values():
            tried.discard(node)
