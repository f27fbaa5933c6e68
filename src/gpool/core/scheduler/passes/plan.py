"""Decides which waiting tasks get which allocations now. Pure: reads a state, writes nothing, the same state gives the same plan.

A pass has two halves. First **starts**: shapes take turns in the policy's order, one allocation a turn, until nothing more
fits. Then **lines**: tasks that cannot start stand in line behind leases of their own shape, evenly and no deeper than
what runs out within `line_target`, so that a node does not idle for a round trip.

What keeps it fair. A line is fed only if its shape would win the allocation again: when another shape that could run there
comes first in the order (counting the line's own allocation as given up), the line runs dry and the allocation goes over.
And small tasks do not starve a large one: once a shape of which nothing runs has waited for `patience`, the node that is
nearest to having room for it takes nothing from those behind it.

No start takes a user or a team past its limit of running GPUs (`policy.limits`); a task that waits for nothing else keeps
no node clear and takes no line from others, but after `patience` its own people's limit is kept for it.

What it costs: a little for each shape that waits, each grant, and each node that changed since a shape was last asked for.
Neither the length of a queue nor the number of nodes matters much. And there is an end to it: a pass starts no more than
`MAX_STARTS`, looks at no more than `MAX_IN_VIEW` shapes, those in turn that do not stand first (`turns`), and looks for what to
stop as long as a budget lasts, and beyond that for some in turn. So everybody is looked at within so many passes.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant, Node, Shape
from gpool.core.scheduler.order.limits import holders_of
from gpool.core.scheduler.order.orders import ORDERS, Order, Policy
from gpool.core.scheduler.passes.draft import Holding, NewLine, Turn
from gpool.core.scheduler.passes.starts import Starts
from gpool.core.scheduler.place import gangs
from gpool.core.scheduler.place.fit import fit, unfit
from gpool.core.scheduler.state.capacity import Room
from gpool.core.scheduler.state.events import Grant, Place, Plan
from gpool.core.scheduler.state.queue import Entry, epoch_of
from gpool.core.scheduler.state.state import State

_LOOKS_FOR_FEEDING = (
    200_000  # comparisons a pass for who comes before whom; past them lines run dry
)
_REFILL = 4  # a line is fed once a quarter of it is gone: fewer, fuller grants

DEFAULT = Policy()


def plan(
    state: State, now: Instant, policy: Policy = DEFAULT, orders: Mapping[str, Order] = ORDERS
) -> Plan:
    """What to lease now. `Invalid` when the policy names an order that is not in the table."""
    draft = _Lines(state, now, policy, order_named(policy.order, orders))
    try:
        draft.start_what_fits()
    finally:
        draft.engine.end_pass()
    draft.fill_lines()
    return draft.result()


def order_named(name: str, orders: Mapping[str, Order] = ORDERS) -> Order:
    order = orders.get(name)
    if order is None:
        raise Invalid(f"no order is called {name!r}; there are: {', '.join(sorted(orders))}")
    return order


def line_depth(state: State, shape: Shape, policy: Policy) -> int:
    """How many leases may stand in one line: 1 while run times are unknown."""
    seen = state.estimate(shape)
    if seen is None:
        return 1
    return max(1, min(policy.max_line, policy.line_target // seen))


class _Lines(Starts):
    """The second half of a pass, and what comes of both."""

    def __init__(self, state: State, now: Instant, policy: Policy, order: Order) -> None:
        super().__init__(state, now, policy, order)
        self.possible: dict[int, bool] = {}  # gangs, by their shapes

    def fill_lines(self) -> None:
        """Shapes without a line cost nothing here, and those with one no more than a budget: whoever has many shapes
        waiting must not hold up the rest."""
        started: dict[int, list[NewLine]] = {}
        for line in self.made:
            started.setdefault(id(line.shape), []).append(line)
        looks = _LOOKS_FOR_FEEDING
        for rank, turn in enumerate(self.waiting):
            made = started.get(id(turn.entry.shape), [])
            if not (made or turn.entry.lines) or turn.entry.shape.requirements.nodes > 1:
                continue
            depth = line_depth(self.state, turn.entry.shape, self.policy)
            if depth > 1 and len(self.made) < self.policy.max_places_per_pass:
                nodes = {line.node for line in made} | {node for node, _ in turn.entry.lines}
                if rank * (1 + len(nodes)) > looks:
                    continue
                looks -= rank * (1 + len(nodes))
                lines = self.lines_to_feed(turn, made, self.waiting[:rank], depth)
                if lines:
                    self.spread(turn, lines, depth)

    def could_start(self, shape: Shape) -> bool:
        """A gang that is larger than every site takes no line from others."""
        if shape.requirements.nodes == 1:
            return True
        known = self.possible.get(id(shape))
        if known is None:
            known = self.possible[id(shape)] = gangs.is_possible(self.engine, shape)
        return known

    def lines_to_feed(
        self, turn: Turn, made: list[NewLine], before: list[Turn], depth: int
    ) -> list[NewLine]:
        shape = turn.entry.shape
        by_node: dict[NodeId, list[NewLine]] = {}
        for (id_, _), line in turn.entry.lines.items():
            by_node.setdefault(id_, []).append(NewLine(id_, line.allocation, shape, line.count))
        for line_made in made:
            by_node.setdefault(line_made.node, []).append(line_made)
        if before:
            own: Holding = made[0] if made else next(iter(turn.entry.lines.values()))
            without = self.key(turn, given_up=1, without=own)
            mine = set(holders_of(shape))
            before = [
                other
                for other in before
                if (not other.is_over or mine.intersection(holders_of(other.entry.shape)))
                and self.could_start(other.entry.shape)
                and self.key_beside(other, own) < without
            ]
        found: list[NewLine] = []
        for id_, lines in by_node.items():
            node = self.node(id_)
            kept = self.kept_clear.get(id_)
            if node is None or (kept is not None and kept.shape is not shape):
                continue
            if unfit(node, shape) is not None or self.is_wanted(node, lines, before):
                continue
            found += [line for line in lines if self.wants_more(node, line, depth)]
        room = self.policy.max_places_per_pass - len(self.made)
        found.sort(
            key=lambda line: (line.before + len(line.grants), line.node, line.allocation.number)
        )
        return found[:room]

    def is_wanted(self, node: Node, lines: list[NewLine], before: list[Turn]) -> bool:
        """Could somebody who comes first start here if these lines were given up?"""
        room: Room | None = None
        for other in before:
            shape = other.entry.shape
            if unfit(node, shape) is not None:
                continue
            if room is None:
                room = self.room(node.id).copy()
                for line in lines:
                    room.give(line.allocation)
            if fit(node, room, shape) is not None:
                return True
        return False

    @staticmethod
    def wants_more(node: Node, line: NewLine, depth: int) -> bool:
        if any(part.gpu_index in node.gpus_withheld for part in line.allocation.slices):
            return False
        return (depth - line.before - len(line.grants)) * _REFILL >= depth

    def spread(self, turn: Turn, lines: list[NewLine], depth: int) -> None:
        """Gives the oldest tasks to the shortest lines, interleaved, all lines about equally long in the end."""
        counts = [line.before + len(line.grants) for line in lines]  # ascending
        level = _water_level(counts, turn.left, depth)
        needs = [max(0, level - count) for count in counts]
        for place in range(
            min(turn.left - sum(needs), len(lines))
        ):  # one more each, as far as it goes
            if counts[place] <= level < depth:
                needs[place] += 1
        entries = turn.take(sum(needs)) if sum(needs) else []
        position = given = 0
        while position < len(entries):
            open_lines = [line for line, need in zip(lines, needs, strict=True) if need > given]
            step = min(need for need in needs if need > given) - given
            block = entries[position : position + step * len(open_lines)]
            for place, line in enumerate(open_lines):
                line.grants += block[place :: len(open_lines)]
            position += len(block)
            given += step
        for line in lines:
            key = (line.node, line.allocation.number)
            if line.grants and key not in self.lines:
                self.lines[key] = line
                self.made.append(line)

    def result(self) -> Plan:
        places = []
        for line in self.made:
            if line.shape.preemptible:
                grants = tuple([self.grant_known(entry) for entry in line.grants])
            else:
                grants = tuple([Grant(TaskId(e[1]), epoch_of(e) + 1) for e in line.grants])
            places.append(Place(line.node, line.allocation, line.shape, grants, line.members))
        return Plan(tuple(places), tuple(self.preemptions), self.is_partial)

    def grant_known(self, entry: Entry) -> Grant:
        """With what is needed to compare it with others while it runs."""
        task = TaskId(entry[1])
        attained = self.state.attained(task, self.now)
        return Grant(task, epoch_of(entry) + 1, Instant(entry[0]), attained)


def _water_level(counts: list[int], tasks: int, depth: int) -> int:
    """The highest level, at most `depth`, to which all shorter lines can be filled with this many tasks."""
    filled = 0
    for place, count in enumerate(counts):
        above = min(counts[place + 1], depth) if place + 1 < len(counts) else depth
        needed = (above - count) * (place + 1)
        if filled + needed > tasks:
            return count + (tasks - filled) // (place + 1)
        filled += needed
    return depth
