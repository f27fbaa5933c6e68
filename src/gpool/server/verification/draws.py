"""Draws of nodes for siblings, from the scheduling state: open nodes of other owners that could run the task.

Nodes with free room are preferred if at least `ENOUGH_OWNERS` more owners than needed have some: a smaller choice would
tell a liar who its partner is. Reads only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Node, Shape, TaskSpec
from gpool.core.scheduler.place.fit import fit, is_open, unfit
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import shape_of
from gpool.core.trust.siblings import ENOUGH_OWNERS, SiblingNode, pick, similar


@dataclass(frozen=True, slots=True)
class SiblingCandidates:
    """Nodes that could run a sibling; `free`: those of them with room now."""

    capable: tuple[SiblingNode, ...]
    free: tuple[SiblingNode, ...]

    def owners(self, taken: Collection[UserId] = ()) -> set[UserId]:
        return {one.owner for one in self.capable}.difference(taken)


def candidates(
    state: State, spec: TaskSpec, user: UserId, team: int | None, banned: Collection[NodeId]
) -> SiblingCandidates:
    """Return the nodes of other owners than `user` that could run a sibling now or later."""
    shape = shape_of(replace(spec, requirements=replace(spec.requirements, siblings=0)), user, team)
    capable: list[SiblingNode] = []
    free: list[SiblingNode] = []
    for entry in state.nodes.values():
        node = entry.node
        if node is None or node.owner == user or node.id in banned:
            continue
        if is_open(node) and unfit(node, shape) is None:
            found = sibling_node(node, shape)
            capable.append(found)
            if fit(node, entry.room, shape) is not None:
                free.append(found)
    return SiblingCandidates(tuple(capable), tuple(free))


def sibling_node(node: Node, shape: Shape) -> SiblingNode:
    gpus = node.offer.gpus if shape.requirements.gpu else ()
    details = gpus[0].details if gpus else None
    ready = shape.environment if shape.environment in node.offer.environments else ""
    return SiblingNode(
        node.id,
        node.owner,
        gpus[0].model if gpus else "",
        "" if details is None else details.driver,
        ready,
    )


def draw_nodes(
    secret: bytes,
    parent: TaskId,
    numbers: Sequence[int],
    found: SiblingCandidates,
    taken: Collection[UserId],
    like: NodeId | None,
) -> list[SiblingNode]:
    """Draw a node of another owner for each number; fewer than asked for means that too few owners are there.

    `like`: node of an earlier sibling, whose GPU model, driver and environment come first.
    """
    used = set(taken)
    drawn: list[SiblingNode] = []
    for number in numbers:
        left = _preferred(found, used, len(numbers) - len(drawn))
        model = next((one for one in found.capable if one.node == like), None)
        if model is None and drawn:
            model = drawn[0]
        chosen = pick(secret, parent, number, left if model is None else similar(left, model), used)
        if chosen is None:
            chosen = pick(secret, parent, number, left, used)
        if chosen is None:
            break
        used.add(chosen.owner)
        drawn.append(chosen)
    return drawn


def _preferred(
    found: SiblingCandidates, used: Collection[UserId], wanted: int
) -> Sequence[SiblingNode]:
    free = [one for one in found.free if one.owner not in used]
    if len({one.owner for one in free}) >= wanted + ENOUGH_OWNERS:
        return free
    return [one for one in found.capable if one.owner not in used]
