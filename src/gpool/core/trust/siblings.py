"""Choice of nodes for siblings: different owners, similar hardware first, unpredictable. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.trust.randomness import DrawPurpose, below, draw

ENOUGH_OWNERS = 3
"""Owners in a class of similar nodes below which dissimilar nodes are drawn too: in a class of two owners each would
know its partner."""

_TRIES = 16


@dataclass(frozen=True, slots=True)
class SiblingNode:
    """A node that could run a sibling; `environment` is the name of the environment or image."""

    node: NodeId
    owner: UserId
    model: str = ""
    driver: str = ""
    environment: str = ""


def similar(candidates: Sequence[SiblingNode], like: SiblingNode) -> Sequence[SiblingNode]:
    """Return the narrowest class with `ENOUGH_OWNERS`: model, driver and environment; model and driver; model; all."""
    for fields in (3, 2, 1):
        wanted = (like.model, like.driver, like.environment)[:fields]
        found = [
            one for one in candidates if (one.model, one.driver, one.environment)[:fields] == wanted
        ]
        if len({one.owner for one in found} - {like.owner}) >= ENOUGH_OWNERS:
            return found
    return candidates


def pick(
    secret: bytes,
    parent: TaskId,
    number: int,
    candidates: Sequence[SiblingNode],
    taken: Collection[UserId],
) -> SiblingNode | None:
    """Draw the node of a parent's sibling `number`; None if every owner is in `taken`.

    Nodes are drawn, not owners: an owner's chance is its share of the nodes.
    """
    if not candidates:
        return None
    for attempt in range(_TRIES):
        drawn = draw(secret, DrawPurpose.SIBLING, (parent, number, attempt))
        found = candidates[below(drawn, len(candidates))]
        if found.owner not in taken:
            return found
    left = [one for one in candidates if one.owner not in taken]
    if not left:
        return None
    return left[below(draw(secret, DrawPurpose.SIBLING, (parent, number, _TRIES)), len(left))]
