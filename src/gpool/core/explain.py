"""Why a task waits, in one sentence a person understands. It looks at the same state and rules as the planner and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gpool.core import environments, gpuspec, prices
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import GIB, Gpu, GpuRequest, Instant, Node, Shape, Tier
from gpool.core.scheduling.fair_share import tenant_of
from gpool.core.scheduling.levels import attained_at
from gpool.core.scheduling.limits import Holder, holders_of, least_gpus
from gpool.core.scheduling.orders import ORDERS, Candidate, Key, Order, Policy
from gpool.core.scheduling.placement import (
    Unfit,
    fit,
    is_open,
    least_price,
    may_join,
    slice_of,
    unfit,
    usable,
)
from gpool.core.scheduling.plan import DEFAULT, order_named
from gpool.core.scheduling.queue import Entry
from gpool.core.scheduling.state import ShapeState, State

Ranking = Callable[[Shape, int, Entry], Key]


@dataclass(frozen=True, slots=True)
class Explanation:
    """`position` is the place among the tasks that wait for the same nodes (1: next), None where nothing can run it."""

    code: str
    sentence: str
    position: int | None = None

    @property
    def ahead(self) -> int:
        return 0 if self.position is None else self.position - 1


def with_story(told: Explanation, tries: int, losses: int, last: str = "") -> Explanation:
    """Tells "no room" from "keeps failing": a task that came back says so first, and what it waits for now."""
    if not tries and not losses:
        return told
    again = f" (last: {last})" if last else ""
    parts = []
    if tries:
        parts.append(f"failed {_count(tries, 'time', 'times')} by itself{again}")
    if losses:
        parts.append(f"lost {_count(losses, 'node', 'nodes')} under it")
    said = f"It {' and '.join(parts)} and waits for its next try. {told.sentence}"
    code = told.code
    if tries > 1:
        code = "keeps_failing"
    elif losses > 1:
        code = "loses_nodes"
    return Explanation(code, said, told.position)


def explain(
    state: State,
    task: TaskId,
    now: Instant,
    policy: Policy = DEFAULT,
    orders: Mapping[str, Order] = ORDERS,
) -> Explanation:
    """Costs shapes x nodes at worst; the length of the queues hardly matters."""
    waiting = state.queue_of(task)
    if waiting is None:
        return _not_waiting(state, task)
    shape = waiting.shape
    nodes = [entry.node for entry in state.nodes.values() if entry.node is not None]
    if not nodes:
        return Explanation(
            "no_node", "No node has joined the pool yet; `gpool join` on any machine adds one."
        )
    connected = [node for node in nodes if node.connected]
    capable = [node for node in connected if unfit(node, shape) is None]
    if not capable:
        away = [node for node in nodes if not node.connected and unfit(node, shape) is None]
        if away:
            return Explanation(
                "not_connected", f"{_those(away)} could run it, but is not connected just now."
            )
        return _nothing_can(connected or nodes, shape)
    open_nodes = [node for node in capable if is_open(node)]
    if not open_nodes and any(node.cordoned for node in capable):
        held = [node for node in capable if node.cordoned]
        said = (
            f"{_those(held)} could run it, but an operator lets nothing new start there just now."
        )
        return Explanation("cordoned", said)
    if not open_nodes:
        why = next((f" ({node.offer.closed})" for node in capable if node.offer.closed), "")
        return Explanation(
            "paused",
            f"{_those(capable)} could run it, but its owner takes no new tasks just now{why}.",
        )
    over = _over_limit(state, shape, policy)
    if over is not None:
        return over
    key = _ranking(state, now, policy, order_named(policy.order, orders))
    ahead = _ahead(state, waiting, task, open_nodes, key)
    if any(fit(node, state.nodes[node.id].room, shape) for node in open_nodes):
        if ahead:
            sentence = f"{_count(ahead, 'task is', 'tasks are')} ahead of it in line."
            return Explanation("ahead", sentence, ahead + 1)
        return Explanation("next", "It starts with the next scheduling pass.", 1)
    return _busy(state, shape, open_nodes, ahead)


def _over_limit(state: State, shape: Shape, policy: Policy) -> Explanation | None:
    least = least_gpus(shape)
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
    entry = state.nodes[line.node]
    name = entry.node.name if entry.node else "a node that has left"
    if line.count == 1:
        return Explanation("leased", f"It does not wait: {name} has it.")
    others = _count(line.count - 1, "other of its kind", "others of its kind")
    return Explanation("leased", f"{name} has it, in one line with {others}.")


# ---- nothing can run it


def _nothing_can(nodes: list[Node], shape: Shape) -> Explanation:
    """Speaks of the nodes that come nearest: those which fail at the latest step."""
    steps = list(Unfit)
    reasons = {node.id: unfit(node, shape) or Unfit.GPU for node in nodes}
    last = max(reasons.values(), key=steps.index)
    near = [node for node in nodes if reasons[node.id] is last]
    needs = shape.requirements
    match last:
        case Unfit.AUDIENCE:
            said = "The owners of the nodes that are here take only the tasks of people they named."
            return Explanation("not_for_you", said)
        case Unfit.RESERVED:
            said = f"{_those(near)} could run it, but is reserved for others just now."
            return Explanation("reserved", said)
        case Unfit.LABELS:
            return _no_such_label(nodes, needs.labels)
        case Unfit.PRICE:
            least = min(least_price(node, needs) for node in near)
            cap = prices.told(needs.max_price_microcredits or 0)
            said = f"It may cost {cap}; the cheapest that could run it costs {prices.told(least)}."
            return Explanation("over_price", said)
        case Unfit.NETWORK:
            said = f"No node gives the network {needs.network.value!r}; its owners can allow it."
            return Explanation("no_network", said)
        case Unfit.RUNTIME:
            asked = [f"isolation {needs.tier.value!r}", f"network {needs.network.value!r}"]
            asked += ["an image"] * (environments.kind_of(shape.environment) == environments.IMAGE)
            asked += ["a GPU"] * bool(needs.gpu)
            said = f"No node gives all of this in one sandbox: {', '.join(asked)}."
            return Explanation("no_runtime", said)
        case Unfit.ENVIRONMENT if environments.kind_of(shape.environment) == environments.PIP:
            said = "No node builds environments from packages; one with uv and egress does."
            return Explanation("no_environment", said)
        case Unfit.ENVIRONMENT if environments.kind_of(shape.environment) == environments.IMAGE:
            said = "No node runs images; one with Docker or Podman does."
            return Explanation("no_environment", said)
        case Unfit.ENVIRONMENT:
            there = sorted({name for node in near for name in node.offer.environments})
            said = f"No node has the environment {shape.environment!r}; there are: {_list(there)}."
            return Explanation("no_environment", said)
        case Unfit.PYTHON:
            there = sorted({minor for node in near for minor in node.offer.pythons}, key=_version)
            said = f"No node has Python {needs.python}; there are: {_list(there)}."
            return Explanation("no_python", said)
        case Unfit.TIER if needs.tier is Tier.NONE:
            said = (
                "Isolation 'none' is only given on your own nodes, and none of yours offers it; "
                "start its agent with --allow-process."
            )
            return Explanation("no_tier", said)
        case Unfit.TIER:
            there = sorted({tier for node in near for tier in node.offer.tiers})
            said = (
                f"No node isolates as strongly as {needs.tier.value!r}; there are: {_list(there)}."
            )
            return Explanation("no_tier", said)
        case Unfit.CPU:
            most = max(node.offer.cpu_milli for node in near)
            said = f"It asks for {needs.cpu_milli / 1000:g} CPUs; the largest node has {most / 1000:g}."
            return Explanation("too_many_cpus", said)
        case Unfit.MEMORY:
            most = max(node.offer.memory_bytes for node in near)
            said = f"It asks for {_gib(needs.memory_bytes or 0)} of memory; the largest node has {_gib(most)}."
            return Explanation("too_much_memory", said)
        case Unfit.DISK:
            most = max(node.offer.disk_bytes for node in near)
            said = f"It asks for {_gib(needs.disk_bytes or 0)} of disk; the largest node has {_gib(most)}."
            return Explanation("too_much_disk", said)
        case Unfit.GPU:
            return _no_such_gpu(near, needs.gpu)
        case Unfit.SITE:
            said = (
                f"It asks for {needs.nodes} nodes of one site, and {_those(near)} could run a part of it, "
                "but its owner names no site whose nodes reach each other."
            )
            return Explanation("no_site", said)


def _no_such_label(nodes: list[Node], wanted: tuple[str, ...]) -> Explanation:
    there = {label for node in nodes for label in node.offer.labels}
    missing = [label for label in wanted if label not in there]
    if missing:
        said = f"No node has the label {_list(missing)}; there are: {_list(sorted(there))}."
    else:
        said = f"No node has all of the labels {_list(list(wanted))} together."
    return Explanation("no_label", said)


def _no_such_gpu(nodes: list[Node], wanted: tuple[GpuRequest, ...]) -> Explanation:
    every = [(node, gpu) for node in nodes for gpu in node.offer.gpus]
    asked = gpuspec.format(wanted)
    if not every:
        return Explanation("no_gpu", f"It asks for a GPU ({asked}) and no node lends one.")
    lent = [gpu for node, gpu in every if gpu.index not in node.gpus_withheld]
    flagged = [gpu for node, gpu in every if gpu.index in node.gpus_flagged]
    suiting = [gpu for gpu in flagged if any(gpuspec.matches(request, gpu) for request in wanted)]
    if suiting and not any(gpuspec.matches(request, gpu) for request in wanted for gpu in lent):
        said = (
            f"{len(suiting)} GPUs would do ({asked}), but were seen under two owners; "
            "they take nothing until an operator decides whose they are."
        )
        return Explanation("flagged", said)
    if not lent:
        return Explanation("withheld", "The owners have set all GPUs unavailable.")
    closed = [gpu for gpu in lent if gpu.closed]
    shut = [gpu for gpu in closed if any(gpuspec.matches(request, gpu) for request in wanted)]
    lent = [gpu for gpu in lent if not gpu.closed]
    if shut and not any(gpuspec.matches(request, gpu) for request in wanted for gpu in lent):
        said = f"{len(shut)} GPUs would do ({asked}), but take nothing just now: {shut[0].closed}."
        return Explanation("closed", said)
    if not lent:
        return Explanation("closed", f"No GPU takes anything just now: {closed[0].closed}.")
    if len(wanted) == 1:
        request = wanted[0]
        most = max(sum(usable(node, gpu, request) for gpu in node.offer.gpus) for node in nodes)
        if most:
            said = f"It asks for {request.count} GPUs of one node ({asked}); the most on one is {most}."
            return Explanation("too_few_gpus", said)
        any_size = replace(request, min_memory_bytes=None, max_memory_bytes=None)
        alike = [gpu for gpu in lent if gpuspec.matches(any_size, gpu)]
        smallest = max(request.min_memory_bytes or 0, request.vram_bytes or 0)
        if alike and max(gpu.memory_bytes for gpu in alike) < smallest:
            largest = max(alike, key=lambda gpu: gpu.memory_bytes)
            said = f"No GPU is that large ({asked}); the largest is {_gpu(largest)}."
            return Explanation("gpu_too_small", said)
    there = _list(sorted({_gpu(gpu) for gpu in lent}))
    return Explanation("no_such_gpu", f"No node lends such a GPU ({asked}); there are: {there}.")


# ---- something can, but not now


def _busy(state: State, shape: Shape, nodes: list[Node], ahead: int) -> Explanation:
    matching = [
        (node, gpu)
        for node in nodes
        for gpu in node.offer.gpus
        if any(usable(node, gpu, request) for request in shape.requirements.gpu)
    ]
    free = [pair for pair in matching if _has_room(state, *pair, shape)]
    if matching and len(free) < min(request.count for request in shape.requirements.gpu):
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
    then = (
        f"{_count(ahead, 'task is', 'tasks are')} ahead of it in line"
        if ahead
        else "it is next in line"
    )
    return Explanation(code, f"{what} busy; {then}.", ahead + 1)


def _has_room(state: State, node: Node, gpu: Gpu, shape: Shape) -> bool:
    room = state.nodes[node.id].room.gpus[gpu.index]
    if not room.holders:
        return True
    return may_join(room, shape.user) and any(
        slice_of(gpu, request).memory_bytes <= room.free_memory
        and slice_of(gpu, request).share_milli <= room.free_share
        for request in shape.requirements.gpu
        if usable(node, gpu, request)
    )


def _ranking(state: State, now: Instant, policy: Policy, order: Order) -> Ranking:
    """The n-th task of a shape is served when its user holds n allocations more: so it is ranked here."""

    def key(shape: Shape, place: int, entry: Entry) -> Key:
        running = state.running.get(shape.user, 0) + place
        at, id_, _ = entry
        tenant = tenant_of(shape)
        candidate = Candidate(
            shape,
            Instant(at),
            TaskId(id_),
            running,
            state.served(shape.user),
            attained_at(shape.level),
            (share(tenant), share(("user", shape.user))),
            state.predictions.of(shape),
        )
        return order(candidate, now, policy)

    def share(holder: Holder) -> int:
        return state.shares.of(holder, policy.weights.get(holder, 1000))

    return key


def _ahead(state: State, mine: ShapeState, task: TaskId, nodes: list[Node], key: Ranking) -> int:
    """How many waiting tasks come first and could use one of the same nodes."""
    entry = mine.queue.entry_of(task)
    if entry is None:
        return 0
    own = mine.queue.count_while(lambda _, other: other < entry)
    my_key = key(mine.shape, own, entry)
    total = own
    for other in state.waiting():
        shape = other.shape
        if other is not mine and any(unfit(node, shape) is None for node in nodes):
            total += other.queue.count_while(
                lambda place, e, shape=shape: key(shape, place, e) < my_key  # type: ignore[misc]
            )
    return total


# ---- words


def _those(nodes: list[Node]) -> str:
    names = [node.name for node in sorted(nodes, key=_node_id)]
    return names[0] if len(names) == 1 else f"Each of {_list(names)}"


def _node_id(node: Node) -> NodeId:
    return node.id


def _list(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _gib(size: int) -> str:
    return f"{round(size / GIB, 1):g} GiB"


def _gpu(gpu: Gpu) -> str:
    simulated = ", simulated" if gpu.simulated else ""
    return f"{gpu.model} ({_gib(gpu.memory_bytes)}{simulated})"


def _version(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split(".") if part.isdigit())
