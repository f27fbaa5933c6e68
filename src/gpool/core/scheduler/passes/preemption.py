"""Which running tasks make room for one that comes before them: the cheapest whole set, or none. It stops nothing itself.

**Who may be stopped.** Only what allows it (`Shape.preemptible`), and only for a task that comes before it in the order, both
seen as if neither ran. That comparison cannot turn round by the exchange itself: what was stopped never takes the room back
from whom it was stopped for, until that one has run long enough to come later. Besides, what was preempted before is left
alone for `policy.protection` after it starts again, by those of other users for a `policy.turn` if that is less; what keeps no
checkpoint, by them and as long as no guarantee is at stake, for as long as it ran before: else it might never end.

**What it costs.** GPUs that have to start anew, those of a gang all together, then tasks. Where that is equal, the last in the
order goes: anything else would be wanted back at the next occasion. A set is stopped only if it makes the whole room: half a
place for a gang helps nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Instant, Node, Shape, Span
from gpool.core.scheduler.order.fair_share import Amounts
from gpool.core.scheduler.order.orders import Key, Policy
from gpool.core.scheduler.place.fit import Fit, fit, is_slice, usable
from gpool.core.scheduler.place.fragmentation import Ints
from gpool.core.scheduler.place.remnants import GPU
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.state import Line, State

Cost = tuple[int, int, Key, NodeId]
_MAX_NODES_TRIED = 32
_STRIDE = 101  # nodes on, each second
MAX_IN_SIGHT = 2000
"""Running tasks that one pass considers to stop."""


def in_sight(state: State, now: Instant, most: int = MAX_IN_SIGHT) -> Iterable[Line]:
    """What may be stopped; in a large pool that of some nodes, all of each, and of others every second."""
    if len(state.stoppable) <= most:
        return [line for line in state.stoppable.values() if not line.stopping and line.leases]
    nodes = list(state.nodes)
    first = (now // SECOND * _STRIDE) % len(nodes)
    found: list[Line] = []
    for id_ in chain(islice(nodes, first, None), islice(nodes, first)):
        if len(found) >= most:
            break
        for number in state.nodes[id_].lines:
            line = state.stoppable.get((id_, number))
            if line is not None and not line.stopping and line.leases:
                found.append(line)
    return found


def began_before(line: Line) -> bool:
    """Whether this is not its first start: then it is left alone for a while (`left_alone_for`)."""
    lease = next(iter(line.leases.values()))
    return lease.epoch > 1 or lease.attained > 0


def left_alone_for(policy: Policy, *, is_own: bool) -> Span:
    """How long what begins again is not stopped for another task, of the same user or not.

    Shares are had by turns: what were protected for longer than a turn would be kept from those whose turn it is.
    """
    if is_own or policy.order != "fair_share":
        return policy.protection
    return min(policy.protection, policy.turn)


def asks_no_less(shape: Shape, other: Shape) -> bool:
    """Whether there is no room for it where there is none for the other one of the same user."""
    more, less = shape.requirements, other.requirements
    if (shape.user, shape.team, shape.environment) != (other.user, other.team, other.environment):
        return False
    if more == less:
        return True
    if len(more.gpu) != 1 or len(less.gpu) != 1:
        return False
    if more.memory_bytes is None or less.memory_bytes is None:
        return False
    return (
        more.gpu[0].count >= less.gpu[0].count
        and more.nodes >= less.nodes
        and more.cpu_milli >= less.cpu_milli
        and more.memory_bytes >= less.memory_bytes
        and replace(more.gpu[0], count=less.gpu[0].count) == less.gpu[0]
        and replace(
            more,
            gpu=less.gpu,
            nodes=less.nodes,
            cpu_milli=less.cpu_milli,
            memory_bytes=less.memory_bytes,
        )
        == less
    )


class Victim(NamedTuple):
    """A line that could be stopped, with its place in the order as if it waited."""

    key: Key
    line: Line

    @property
    def amounts(self) -> Amounts:
        return self.line.amounts

    @property
    def parts(self) -> tuple[Line, ...]:
        return self.line, *self.line.members


class Victims:
    """Those of one user and size together, the last in the order first; what all of a group have in common as rows.

    `had`, `held`: of each group, what its tenant had lately and holds now.
    """

    def __init__(self, groups: list[list[Victim]], had: list[int], held: list[int]) -> None:
        self._groups = groups
        self._had: Ints = np.array(had, np.int64)
        self._held: Ints = np.array(held, np.int64)
        heads = [(alike[0].key, alike[0].line.shape) for alike in groups]
        self._bands: Ints = np.array([key[0] for key, _ in heads], np.int64)
        self._shares: Ints = np.array([(*key[1:2], 0)[0] for key, _ in heads], np.int64)
        self._users: Ints = np.array([shape.user for _, shape in heads], np.int64)
        teams = [-1 if shape.team is None else shape.team for _, shape in heads]
        self._teams: Ints = np.array(teams, np.int64)

    def worth_a_look(
        self, shape: Shape, mine: Key, had: int, holds: int, policy: Policy
    ) -> Iterator[list[Victim]]:
        """Groups of which some might be stopped for one with this key (`outranks`): all others may not, for certain.

        `had`, `holds`: what its tenant had lately and holds now.
        """
        bands = self._bands
        maybe = self._users == shape.user
        if shape.team is not None:
            maybe |= self._teams == shape.team
        if policy.order == "fair_share":
            share, margin = mine[1], policy.margin_milli
            after = self._shares * (1000 - margin) > share * (1000 + margin)
            after |= (self._had >= had) & (self._held > holds)  # by turns
            maybe |= (bands == mine[0]) & (after | (self._shares == share))
        else:
            maybe |= bands == mine[0]
        maybe |= bands > mine[0]
        for place in np.flatnonzero(maybe).tolist():
            yield self._groups[place]


class Clearing(NamedTuple):
    """A place on one node once `victims` are gone."""

    node: NodeId
    fit: Fit
    victims: tuple[Victim, ...]


def cheapest(
    shape: Shape, count: int, places: Iterable[tuple[Node, Room, list[Victim]]]
) -> list[Clearing] | None:
    """The `count` nodes where the least has to stop for one more allocation of this shape each; None: there are not so many.

    A room is what will be free there without stopping anything more. The rooms are not changed.
    """
    options = []
    for node, room, victims in places:
        chosen = least(node, room, shape, victims)
        if chosen is not None:
            options.append((cost_of(chosen, node.id), node, room, chosen, victims))
    if len(options) < count:
        return None
    options.sort(key=lambda option: option[0])
    found: list[Clearing] = []
    short = []
    for _, node, room, chosen, victims in options[: count + _MAX_NODES_TRIED]:
        clearing = cleared(node, room, shape, chosen)
        if clearing is not None:
            found.append(clearing)
            if len(found) == count:
                return found
        else:
            short.append(completed(node, room, shape, chosen, victims))
    more = [each for each in short if each is not None]
    found += sorted(more, key=lambda each: cost_of(list(each.victims), each.node))
    return found[:count] if len(found) >= count else None


def cleared(node: Node, room: Room, shape: Shape, chosen: list[Victim]) -> Clearing | None:
    trial = room.copy()
    for victim in chosen:
        give(trial, node.id, victim)
    fits = fit(node, trial, shape)
    return None if fits is None else Clearing(node.id, fits, tuple(chosen))


def completed(
    node: Node, room: Room, shape: Shape, chosen: list[Victim], victims: list[Victim]
) -> Clearing | None:
    """With more of the victims where GPUs are not all that is short: CPU, memory or disk."""
    left = [victim for victim in victims if victim not in chosen]
    trial = room.copy()
    for victim in chosen:
        give(trial, node.id, victim)
    more = _until_it_fits(node, trial, shape, left)
    return None if more is None else cleared(node, room, shape, [*chosen, *more])


def cost_of(chosen: list[Victim], node: NodeId) -> Cost:
    """What stopping these costs, to be compared: the least first."""
    gpus = sum(victim.amounts[0] for victim in chosen)
    first = min((victim.key for victim in chosen), default=())
    return gpus, len(chosen), tuple([-number for number in first]), node


def give(room: Room, node: NodeId, victim: Victim) -> None:
    for part in victim.parts:
        if part.node == node:
            room.give(part.allocation)


def take(room: Room, node: NodeId, victim: Victim) -> None:
    """The opposite of `give`."""
    for part in victim.parts:
        if part.node == node:
            room.take(part.allocation, victim.line.shape.user)


def least(node: Node, room: Room, shape: Shape, victims: list[Victim]) -> list[Victim] | None:
    """Of whole GPUs only those are looked at: `completed` adds what else is short."""
    requests = shape.requirements.gpu
    if requests and not any(is_slice(request) for request in requests):
        request = requests[0]
        idle = sum(
            1 for gpu in room.gpus.values() if not gpu.holders and usable(node, gpu.gpu, request)
        )
        return _enough_gpus(request.count - idle, node.id, victims)
    return _until_it_fits(node, room, shape, victims)


def _until_it_fits(
    node: Node, room: Room, shape: Shape, victims: list[Victim]
) -> list[Victim] | None:
    """The smallest first, of equals the last in the order; then those go on without which there is room all the same."""
    chosen: list[Victim] = []
    trial = room.copy()
    ordered = sorted(victims, key=_key, reverse=True)
    ordered.sort(key=lambda victim: victim.amounts)
    for victim in ordered:
        if fit(node, trial, shape) is not None:
            break
        give(trial, node.id, victim)
        chosen.append(victim)
    if fit(node, trial, shape) is None:
        return None
    needed: list[Victim] = []
    for victim in reversed(chosen):
        take(trial, node.id, victim)
        if fit(node, trial, shape) is None:
            give(trial, node.id, victim)
            needed.append(victim)
    return needed[::-1]


def _enough_gpus(short: int, node: NodeId, victims: list[Victim]) -> list[Victim] | None:
    """The set that gives back `short` GPUs on this node and costs least: exactly, since a node has few."""
    if short <= 0:
        return []
    sized = []
    for victim in sorted(victims, key=_key, reverse=True):  # of equals the last in the order
        here = sum(len(part.allocation.slices) for part in victim.parts if part.node == node)
        if victim.amounts[0] == short * GPU and here == short:
            return [victim]  # nothing can cost less
        sized.append((victim.amounts[0], min(here, short), victim))
    best: list[tuple[int, int, tuple[Victim, ...]] | None] = [(0, 0, ()), *[None] * short]
    for cost, here, victim in sized:
        for freed in range(short - 1, -1, -1):
            before = best[freed]
            if before is None or not here:
                continue
            found = before[0] + cost, before[1] + 1, (*before[2], victim)
            there = best[min(short, freed + here)]
            if there is None or found[:2] < there[:2]:
                best[min(short, freed + here)] = found
    made = best[short]
    return None if made is None else list(made[2])


def _key(victim: Victim) -> Key:
    return victim.key
