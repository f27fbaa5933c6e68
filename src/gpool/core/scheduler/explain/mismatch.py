"""Reason why no idle node could run a task: one sentence about the nearest nodes. Read-only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpool.core.ids import NodeId
from gpool.core.model import Gpu, Node, Shape, Tier
from gpool.core.scheduler.place.fit import (
    Unfit,
    is_lent_to,
    is_of_tier,
    possible_prices,
    unfit,
    usable,
)
from gpool.core.specs import fields, owners
from gpool.core.specs import gpu as gpuspec


@dataclass(frozen=True, slots=True)
class Explanation:
    """`position`: rank among tasks waiting for the same nodes (1: next); None if no node can run it."""

    code: str
    sentence: str
    position: int | None = None

    @property
    def ahead(self) -> int:
        return 0 if self.position is None else self.position - 1


def nothing_can(nodes: list[Node], shape: Shape) -> Explanation:
    """Explain by the nodes that fail the latest check."""
    steps = list(Unfit)
    reasons = {node.id: unfit(node, shape) or Unfit.GPU for node in nodes}
    last = max(reasons.values(), key=steps.index)
    near = [node for node in nodes if reasons[node.id] is last]
    needs = shape.requirements
    others = [node for node in nodes if reasons[node.id] is Unfit.OWNER]
    if others:
        unbound = replace(shape, requirements=replace(needs, on=None))
        able = [node for node in others if unfit(node, unbound) is None]
        if able:
            return _only_of_others(able, shape)
    labelled = [node for node in nodes if set(needs.labels) <= set(node.offer.labels)]
    if labelled and len(labelled) < len(nodes):
        nearest = max((reasons[node.id] for node in labelled), key=steps.index)
        if nearest in (Unfit.AUDIENCE, Unfit.RESERVED, Unfit.PRICE):  # nodes with the labels exist
            return nothing_can(labelled, shape)
    unlabelled = [node for node in nodes if reasons[node.id] is Unfit.LABELS]
    if unlabelled and last is not Unfit.LABELS:
        bare = replace(shape, requirements=replace(needs, labels=()))
        able = [node for node in unlabelled if unfit(node, bare) is None]
        if able:
            return _only_elsewhere(able, shape, is_gpu=last is Unfit.GPU)
    match last:
        case Unfit.SIBLINGS:
            said = f"Its siblings run on nodes of {needs.siblings} owners or more; it ends when their answers agree."
            return Explanation("verifying", said)
        case Unfit.OWNER:
            return _only_of_others([], shape)
        case Unfit.AUDIENCE:
            said = "The owners of the nodes that are here take only the tasks of people they named."
            return Explanation("not_for_you", said)
        case Unfit.RESERVED:
            said = f"{those(near)} could run it, but is reserved for others just now."
            return Explanation("reserved", said)
        case Unfit.LABELS:
            return _no_such_label(nodes, needs.labels)
        case Unfit.PRICE:
            least = min(min(possible_prices(node, shape)) for node in near)
            cap = fields.format_price(needs.max_price_microcredits or 0)
            said = f"It may cost {cap}; the cheapest that could run it costs {fields.format_price(least)}."
            return Explanation("over_price", said)
        case Unfit.NETWORK:
            said = f"No node gives the network {needs.network.value!r}; its owners can allow it."
            return Explanation("no_network", said)
        case Unfit.RUNTIME:
            asked = [f"isolation {needs.tier.value!r}", f"network {needs.network.value!r}"]
            asked += ["an image"] * (
                fields.environment_kind(shape.environment) == fields.IMAGE_ENVIRONMENT
            )
            asked += ["a GPU"] * bool(needs.gpu)
            said = f"No node gives all of this in one sandbox: {', '.join(asked)}."
            return Explanation("no_runtime", said)
        case Unfit.ENVIRONMENT if (
            fields.environment_kind(shape.environment) == fields.PIP_ENVIRONMENT
        ):
            said = "No node builds environments from packages; one with uv and egress does."
            return Explanation("no_environment", said)
        case Unfit.ENVIRONMENT if (
            fields.environment_kind(shape.environment) == fields.IMAGE_ENVIRONMENT
        ):
            said = "No node runs images; one with Docker or Podman does."
            return Explanation("no_environment", said)
        case Unfit.ENVIRONMENT:
            there = sorted({name for node in near for name in node.offer.environments})
            said = (
                f"No node has the environment {shape.environment!r}; there are: {list_of(there)}."
            )
            return Explanation("no_environment", said)
        case Unfit.PYTHON:
            there = sorted({minor for node in near for minor in node.offer.pythons}, key=_version)
            said = f"No node has Python {needs.python}; there are: {list_of(there)}."
            return Explanation("no_python", said)
        case Unfit.TIER if needs.tier is Tier.NONE:
            said = (
                "Isolation 'none' is only given on your own nodes, and none of yours offers it; "
                "start its agent with --allow-process."
            )
            return Explanation("no_tier", said)
        case Unfit.TIER:
            there = sorted({tier for node in near for tier in node.offer.tiers})
            said = f"No node isolates as strongly as {needs.tier.value!r}; there are: {list_of(there)}."
            return Explanation("no_tier", said)
        case Unfit.CPU:
            most = max(node.offer.cpu_milli for node in near)
            said = f"It asks for {needs.cpu_milli / 1000:g} CPUs; the largest node has {most / 1000:g}."
            return Explanation("too_many_cpus", said)
        case Unfit.MEMORY:
            most = max(node.offer.memory_bytes for node in near)
            said = f"It asks for {gpuspec.gib(needs.memory_bytes or 0)} of memory; the largest node has {gpuspec.gib(most)}."
            return Explanation("too_much_memory", said)
        case Unfit.DISK:
            most = max(node.offer.disk_bytes for node in near)
            said = f"It asks for {gpuspec.gib(needs.disk_bytes or 0)} of disk; the largest node has {gpuspec.gib(most)}."
            return Explanation("too_much_disk", said)
        case Unfit.GPU:
            return _no_such_gpu(near, shape)
        case Unfit.SITE:
            said = (
                f"It asks for {needs.nodes} nodes of one site, and {those(near)} could run a part of it, "
                "but its owner names no site whose nodes reach each other; --site does when they join."
            )
            return Explanation("no_site", said)


def _only_of_others(able: list[Node], shape: Shape) -> Explanation:
    on = shape.requirements.on
    said = f"No node of {'the owners it accepts' if on is None else owners.phrase(on)} can run it"
    if able:
        names = list_of([node.name for node in sorted(able, key=_node_id)])
        return Explanation("no_owner", f"{said}; with --on anyone it could run on {names}.")
    return Explanation("no_owner", f"{said}, and no other node could either.")


def _no_such_label(nodes: list[Node], wanted: tuple[str, ...]) -> Explanation:
    there = {label for node in nodes for label in node.offer.labels}
    missing = [label for label in wanted if label not in there]
    if missing:
        said = f"No node has the label {list_of(missing)}; there are: {list_of(sorted(there))}."
    else:
        said = f"No node has all of the labels {list_of(list(wanted))} together."
    return Explanation("no_label", said)


def _only_elsewhere(able: list[Node], shape: Shape, *, is_gpu: bool) -> Explanation:
    needs = shape.requirements
    lacked = [each for each in needs.labels if any(each not in n.offer.labels for n in able)]
    what = f"with such a GPU ({gpuspec.format(needs.gpu)})" if is_gpu else "that could run it"
    names = list_of([node.name for node in sorted(able, key=_node_id)])
    word = "labels" if len(lacked) > 1 else "label"
    said = f"No node {what} has the {word} {list_of(lacked)}; without that it could run on {names}."
    return Explanation("no_label", said)


def _no_such_gpu(nodes: list[Node], shape: Shape) -> Explanation:
    wanted = shape.requirements.gpu
    every = [(node, gpu) for node in nodes for gpu in node.offer.gpus]
    asked = gpuspec.format(wanted)
    if not every:
        return Explanation("no_gpu", f"It asks for a GPU ({asked}) and no node lends one.")
    lent = [gpu for node, gpu in every if gpu.index not in node.gpus_withheld]
    flagged = [gpu for node, gpu in every if gpu.index in node.gpus_flagged]
    suiting = [gpu for gpu in flagged if any(gpuspec.matches(request, gpu) for request in wanted)]
    if suiting and not any(gpuspec.matches(request, gpu) for request in wanted for gpu in lent):
        said = (
            f"{len(suiting)} GPUs would do ({asked}), but are flagged: each is bound to another owner or not "
            "verified; they take nothing until an operator decides."
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
    barred = [gpu for node, gpu in every if gpu in lent and not is_lent_to(node, gpu, shape)]
    shut = [gpu for gpu in barred if any(gpuspec.matches(request, gpu) for request in wanted)]
    others = [gpu for gpu in lent if gpu not in barred]
    if shut and not any(gpuspec.matches(request, gpu) for request in wanted for gpu in others):
        if not any(gpu.untested for gpu in shut):
            said = (
                f"{len(shut)} GPUs would do ({asked}), but have not proved what they claim: they serve their owner, the "
                "owner's teams and tasks that name the owner (--on user:NAME); an operator can admit them for everyone."
            )
            return Explanation("unproven", said)
        said = (
            f"{len(shut)} GPUs would do ({asked}), but gpool was never run on their kind, and their owners lend them "
            "to themselves and their teams only; GPOOL_AGENT_LEND_UNTESTED lends them to everyone."
        )
        return Explanation("untested", said)
    if not lent:
        return Explanation("closed", f"No GPU takes anything just now: {closed[0].closed}.")
    apart = [gpu for gpu in others if not is_of_tier(gpu, shape)]
    shut = [gpu for gpu in apart if any(gpuspec.matches(request, gpu) for request in wanted)]
    others = [gpu for gpu in others if gpu not in apart]
    if shut and not any(gpuspec.matches(request, gpu) for request in wanted for gpu in others):
        said = f"{len(shut)} GPUs would do ({asked}), but " + (
            "none is passed through to guests, and isolation 'vm' gives no other; GPOOL_AGENT_VFIO names such cards."
            if shape.requirements.tier is Tier.VM
            else "they are passed through to guests: ask for the tier 'vm'."
        )
        return Explanation("guest_gpu", said)
    if len(wanted) == 1:
        request = wanted[0]
        most = max(
            sum(usable(node, gpu, request, shape=shape) for gpu in node.offer.gpus)
            for node in nodes
        )
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
    there = list_of(sorted({_gpu(gpu) for gpu in lent}))
    return Explanation("no_such_gpu", f"No node lends such a GPU ({asked}); there are: {there}.")


# ---- phrases


def those(nodes: list[Node]) -> str:
    names = [node.name for node in sorted(nodes, key=_node_id)]
    return names[0] if len(names) == 1 else f"Each of {list_of(names)}"


def _node_id(node: Node) -> NodeId:
    return node.id


def list_of(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def ranked(name: str, rank: int) -> str:
    return f"{name} (rank {rank})"


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _gpu(gpu: Gpu) -> str:
    simulated = ", simulated" if gpu.simulated else ""
    return f"{gpu.model} ({gpuspec.gib(gpu.memory_bytes)}{simulated})"


def _version(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split(".") if part.isdigit())
