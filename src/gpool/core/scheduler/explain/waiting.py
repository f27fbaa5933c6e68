"""Reason why a task waits, as one sentence, from the planner's state and rules. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, EndReason, Gpu, Instant, Node, Shape
from gpool.core.scheduler.explain.mismatch import (
    Explanation,
    counted,
    list_of,
    nothing_can,
    ranked,
    those,
)
from gpool.core.scheduler.order.builtin import ORDERS, order_named
from gpool.core.scheduler.order.limits import holders_of, least_gpus
from gpool.core.scheduler.order.orders import Order, Policy
from gpool.core.scheduler.order.ranking import STEP, Ranking
from gpool.core.scheduler.passes.plan import DEFAULT
from gpool.core.scheduler.place.fit import fit, is_open, may_join, slice_of, unfit, usable
from gpool.core.scheduler.place.gangs import most_together
from gpool.core.scheduler.place.input_affinity import loading, may_wait, ready_soon
from gpool.core.scheduler.state.state import State
from gpool.core.scheduler.state.waiting import ShapeState

# ---- history of the task

ADVICE: Mapping[EndReason, str] = {
    EndReason.OUT_OF_MEMORY: "Ask for more memory (--memory), or for less work at once.",
    EndReason.TIMED_OUT: "Give it longer (--timeout), or keep checkpoints (--checkpoint).",
    EndReason.BAD_INPUT: "Submit it again, so that its inputs are uploaded anew.",
    EndReason.BAD_OUTPUT: "Look at the outputs it names (--output) and at their sizes.",
    EndReason.SANDBOX_FAILED: "That is the node's fault: its owner's `gpool node doctor` says more.",
}
"""Remedy for an end reason; others are in the task's log."""


@dataclass(frozen=True, slots=True)
class Story:
    """`last` and `why`: the last own failure, `lost`: the last loss."""

    tries: int = 0
    losses: int = 0
    preempted: int = 0
    last: str = ""
    why: EndReason | None = None
    lost: str = ""
    log: str = ""  # command that prints its output
    unstarted: tuple[str, ...] = ()  # nodes with failed starts
    said: str = ""  # message of the last of them


def with_story(told: Explanation, story: Story) -> Explanation:
    """State a requeued task's failure and remedy first, to tell "no capacity" from "keeps failing"."""
    parts, advice, code = [], "", told.code
    if story.preempted:
        stops = counted(story.preempted, "time", "times")
        parts.append(f"was stopped {stops} for other tasks or by its node's owner")
    if story.losses:
        last = f" (last: {story.lost})" if story.lost else ""
        parts.append(f"lost {counted(story.losses, 'node', 'nodes')} under it{last}")
        if story.losses > 1:
            code = "loses_nodes"
            advice = " After three it is given up: see that it does not take its nodes down."
    if story.unstarted:
        said = f" ({story.said})" if story.said else ""
        parts.append(f"could not be started on {list_of(list(story.unstarted))}{said}")
        advice = " It goes to another node where one would do, and is given up after some tries."
    if story.tries:
        last = f" (last: {story.last})" if story.last else ""
        parts.append(f"failed {counted(story.tries, 'time', 'times')} by itself{last}")
        looked = f"`{story.log}` shows what it wrote." if story.log else ""
        advice = f" {ADVICE.get(story.why, looked) if story.why else looked}".rstrip()
        if story.tries > 1:
            code = "keeps_failing"
    if not parts:
        return told
    said = f"It {' and '.join(parts)}, and waits for its next start.{advice} {told.sentence}"
    return Explanation(code, said, told.position)


# ---- reasons


def explain(
    state: State,
    task: TaskId,
    now: Instant,
    policy: Policy = DEFAULT,
    orders: Mapping[str, Order] = ORDERS,
) -> Explanation:
    """Cost: shapes × nodes at worst; hardly depends on the queue's length."""
    steps = in_steps(state, task, now, policy, orders)
    while (told := step(steps)) is None:
        pass
    return told


def step(steps: Generator[None, None, Explanation]) -> Explanation | None:
    """None: there are more steps."""
    try:
        next(steps)
    except StopIteration as end:
        told: Explanation = end.value
        return told
    return None


def in_steps(
    state: State, task: TaskId, now: Instant, policy: Policy, orders: Mapping[str, Order]
) -> Generator[None, None, Explanation]:
    """Changes of the state between steps are harmless."""
    waiting = state.queue_of(task)
    if waiting is None:
        return _not_waiting(state, task)
    shape = waiting.shape
    found = yield from _candidates(state, shape, policy)
    if isinstance(found, Explanation):
        return found
    connected, capable, open_nodes = found.connected, found.capable, found.open
    ranking = Ranking(state, now, policy, order_named(policy.order, orders))
    ahead = yield from ranking.ahead(waiting, task, open_nodes)
    fitting = yield from _of(open_nodes, lambda node: _fits(state, node, shape))
    if _are_enough(fitting, shape):
        if ahead:
            sentence = f"{counted(ahead, 'task is', 'tasks are')} ahead of it in line."
            return Explanation("ahead", sentence, ahead + 1)
        if _waits_for_inputs(state, waiting, fitting, now, policy):
            seconds = loading(shape) / SECOND
            said = f"Loading its inputs elsewhere would take {seconds:.0f} s: it waits for a node that has them."
            return Explanation("awaits_inputs", said, 1)
        return Explanation("next", "It starts with the next scheduling pass.", 1)
    open_nodes = [node for node in open_nodes if node.id in state.nodes]
    told = _busy(state, shape, open_nodes, fitting, ahead)
    besides = _besides(connected, capable, shape)
    return replace(told, sentence=f"{told.sentence}{besides}")


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Nodes for a shape: all connected, those of them that could run it, and those of these that are open."""

    connected: list[Node]
    capable: list[Node]
    open: list[Node]


def _candidates(
    state: State, shape: Shape, policy: Policy
) -> Generator[None, None, Explanation | _Candidates]:
    nodes = [entry.node for entry in state.nodes.values() if entry.node is not None]
    if not nodes:
        return Explanation(
            "no_node", "No node has joined the pool yet; `gpool join` on any machine adds one."
        )
    connected = [node for node in nodes if node.connected]
    capable = yield from _of(connected, lambda node: unfit(node, shape) is None)
    if not _are_enough(capable, shape):
        return _too_few(nodes, capable, shape)
    capable = _not_tried(capable, shape)
    open_nodes = [node for node in capable if is_open(node)]
    if not _are_enough(open_nodes, shape):
        return _closed(capable, open_nodes, shape)
    over = _over_limit(state, shape, policy)
    return _Candidates(connected, capable, open_nodes) if over is None else over


def reason_code(state: State, shape: Shape, policy: Policy) -> Generator[None, None, str]:
    """Code of the reason why tasks of a shape wait, in steps; cost: nodes. Without positions in the queue: tasks for
    which there is room are `next`.
    """
    found = yield from _candidates(state, shape, policy)
    if isinstance(found, Explanation):
        return found.code
    fitting = yield from _of(found.open, lambda node: _fits(state, node, shape))
    if _are_enough(fitting, shape):
        return "next"
    present = [node for node in found.open if node.id in state.nodes]
    return _busy(state, shape, present, fitting, 0).code


def _not_tried(capable: list[Node], shape: Shape) -> list[Node]:
    if not shape.avoids:
        return capable
    others = [node for node in capable if node.id not in shape.avoids]
    return others if _are_enough([node for node in others if is_open(node)], shape) else capable


def _of(nodes: list[Node], is_meant: Callable[[Node], bool]) -> Generator[None, None, list[Node]]:
    found = []
    for number, node in enumerate(nodes, 1):
        if number % (4 * STEP) == 0:
            yield
        if is_meant(node):
            found.append(node)
    return found


def _fits(state: State, node: Node, shape: Shape) -> bool:
    entry = state.nodes.get(node.id)
    return entry is not None and fit(node, entry.room, shape) is not None


def _waits_for_inputs(
    state: State, waiting: ShapeState, fitting: list[Node], now: Instant, policy: Policy
) -> bool:
    shape, head = waiting.shape, waiting.queue.head()
    if head is None or not may_wait(shape, Instant(head[0]), now, policy.patience):
        return False
    there = state.caches.with_data(shape.data)
    if any(node.id in there for node in fitting):
        return False
    return ready_soon(state, shape, now) >= waiting.queue.size


def _are_enough(nodes: list[Node], shape: Shape) -> bool:
    wanted = shape.requirements.nodes
    return bool(nodes) if wanted == 1 else most_together(nodes) >= wanted


def _too_few(nodes: list[Node], capable: list[Node], shape: Shape) -> Explanation:
    away = [node for node in nodes if not node.connected and unfit(node, shape) is None]
    if _are_enough(capable + away, shape):
        said = f"{those(away)} could run it, but is not connected just now."
        return Explanation("not_connected", said)
    kept = _reserved(nodes, shape)
    if _are_enough(capable + away + kept, shape):
        said = f"{those(kept)} could run it, but is reserved for others just now."
        return Explanation("reserved", said)
    if not capable and not away:
        return nothing_can([node for node in nodes if node.connected] or nodes, shape)
    most, wanted = most_together(capable + away), shape.requirements.nodes
    said = f"No site has {wanted} nodes that could run it; the most in one is {most}."
    return Explanation("no_site", said)


def _closed(capable: list[Node], open_nodes: list[Node], shape: Shape) -> Explanation:
    shut = [node for node in capable if not is_open(node)]
    held = [node for node in shut if node.cordoned]
    part = ""
    if open_nodes:
        most, wanted = most_together(open_nodes), shape.requirements.nodes
        part = f"It needs {wanted} nodes of one site, and just now no site has more than {most}: "
    if held:
        said = f"{those(held)} could run it, but an operator lets nothing new start there just now."
        return Explanation("cordoned", part + said)
    tired = [node for node in shut if node.resting]
    if tired:
        said = f"{those(tired)} could run it, but {tired[0].resting}; it is asked later."
        return Explanation("resting", part + said)
    why = next((f" ({node.offer.closed})" for node in shut if node.offer.closed), "")
    said = f"{those(shut)} could run it, but its owner takes no new tasks just now{why}."
    return Explanation("paused", part + said)


def _over_limit(state: State, shape: Shape, policy: Policy) -> Explanation | None:
    least = least_gpus(shape) * shape.requirements.nodes
    for holder in holders_of(shape) if least else ():
        limit, used = policy.limits.of(holder), state.gpus.get(holder, 0)
        if limit is None or used + least <= limit:
            continue
        whose = "You" if holder[0] == "user" else "Your team"
        said = f"{whose} may run {limit / 1000:g} GPUs at once"
        if least > limit:
            return Explanation("over_quota", f"{said}; it asks for {least / 1000:g}.")
        return Explanation(
            "quota_used",
            f"{said} and {used / 1000:g} are in use; it starts when enough of them end.",
        )
    return None


def _not_waiting(state: State, task: TaskId) -> Explanation:
    line = state.held.get(task)
    if line is None:
        return Explanation("not_waiting", "It does not wait: it has ended, or is not known here.")
    parts = [line, *line.members]
    names = [
        entry.node.name if entry.node else "a node that has left"
        for entry in (state.nodes[part.node] for part in parts)
    ]
    if len(names) > 1:
        told = list_of([ranked(name, rank) for rank, name in enumerate(names)])
        return Explanation("leased", f"It does not wait: {told} have it.")
    if line.count == 1:
        return Explanation("leased", f"It does not wait: {names[0]} has it.")
    others = counted(line.count - 1, "other of its kind", "others of its kind")
    return Explanation("leased", f"{names[0]} has it, in one line with {others}.")


# ---- a node could run it, but not now


def _busy(
    state: State, shape: Shape, nodes: list[Node], fitting: list[Node], ahead: int
) -> Explanation:
    needs = shape.requirements
    matching = [
        (node, gpu)
        for node in nodes
        for gpu in node.offer.gpus
        if any(usable(node, gpu, each, needs.max_price_microcredits, shape) for each in needs.gpu)
    ]
    free = [pair for pair in matching if _has_room(state, *pair, shape)]
    then = (
        f"{counted(ahead, 'task is', 'tasks are')} ahead of it in line"
        if ahead
        else "it is next in line"
    )
    if needs.nodes > 1:
        code = "gpus_busy" if matching else "nodes_busy"
        has = most_together(fitting)
        room = f"{has} is the most in one" if has else "none has any"
        said = f"No site has {needs.nodes} nodes with room for it just now, {room}; {then}."
        return Explanation(code, said, ahead + 1)
    if matching and len(free) < min(request.count for request in needs.gpu):
        code = "gpus_busy"
        what = (
            "The only matching GPU is"
            if len(matching) == 1
            else f"All {len(matching)} matching GPUs are"
        )
        if free:
            held = len(matching) - len(free)
            what = f"{held} of the {len(matching)} matching GPUs {'is' if held == 1 else 'are'}"
    else:
        code = "nodes_busy"
        what = (
            "The only node that can run it is"
            if len(nodes) == 1
            else f"All {len(nodes)} nodes that can run it are"
        )
        beside = _lacking(state, [node for node, _ in free], shape)
        if beside:
            said = f"A matching GPU is free, but its node has too {beside} for it now; {then}."
            return Explanation(code, said, ahead + 1)
    return Explanation(code, f"{what} busy; {then}.", ahead + 1)


def _lacking(state: State, nodes: list[Node], shape: Shape) -> str:
    """Resource besides GPUs that every one of these nodes lacks; empty if none, or without nodes."""
    rooms = [state.nodes[node.id].room for node in nodes]
    needs = shape.requirements
    if rooms and all(room.free_cpu < needs.cpu_milli for room in rooms):
        return "few free processors"
    memory = needs.memory_bytes or 0
    if rooms and all(room.free_memory < memory for room in rooms):
        return "little free memory"
    return ""


def _has_room(state: State, node: Node, gpu: Gpu, shape: Shape) -> bool:
    room = state.nodes[node.id].room.gpus.get(gpu.index)
    if room is None:
        return False  # the GPU has disappeared meanwhile
    if not room.holders:
        return True
    return may_join(room, shape.user) and any(
        slice_of(gpu, request).memory_bytes <= room.free_memory
        and slice_of(gpu, request).share_milli <= room.free_share
        for request in shape.requirements.gpu
        if usable(node, gpu, request, shape=shape)
    )


def _besides(connected: list[Node], capable: list[Node], shape: Shape) -> str:
    cordoned = [node for node in capable if node.cordoned]
    reserved = _reserved(connected, shape)
    told = ""
    if cordoned:
        told += f" {those(cordoned)} could run it too, but is cordoned."
    if reserved:
        told += f" {those(reserved)} could run it too, but is reserved for others just now."
    return told


def _reserved(nodes: list[Node], shape: Shape) -> list[Node]:
    return [
        node
        for node in nodes
        if node.reserved_for is not None
        and unfit(node, shape) is not None
        and unfit(replace(node, reserved_for=None), shape) is None
    ]
