"""Metrics read from the server's state at each scrape, so that removed nodes leave no series and nothing is counted
twice. Reads the picture and telemetry, changes nothing; cost: connected nodes and GPUs, at most `most_gpus` in full.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpool.core.ids import NodeId, encode
from gpool.core.model import SECOND, Availability, Gpu, Instant, Node
from gpool.core.scheduler.state.capacity import GpuRoom
from gpool.core.scheduler.state.waiting import NodeState
from gpool.server.alerts.monitor import QueueSurvey, UnclearedFunds
from gpool.server.metrics import catalogue
from gpool.server.metrics.catalogue import MetricSpec
from gpool.server.metrics.registry import OTHER
from gpool.server.nodes.registry import NodeRegistry
from gpool.server.nodes.telemetry import Telemetry
from gpool.server.scheduling.picture import StatePicture

MOST_MODELS = 20
"""GPU models with series of their own, the most frequent ones; the others are `other`."""

_READINGS: Mapping[str, tuple[MetricSpec, float]] = {
    "utilisation_percent": (catalogue.GPU_UTILISATION, 0.01),
    "memory_bytes": (catalogue.GPU_MEMORY_USED, 1.0),
    "power_mw": (catalogue.GPU_POWER, 0.001),
    "temperature_c": (catalogue.GPU_TEMPERATURE, 1.0),
}


@dataclass(frozen=True, slots=True)
class Observed:
    """Parts of a server that `ServerCollector` reads."""

    picture: StatePicture
    telemetry: Telemetry
    survey: QueueSurvey
    now: Callable[[], Instant]
    is_leader: Callable[[], bool]
    version: str
    most_gpus: int
    data: Path
    min_free_bytes: int
    feed_lag_s: Callable[[], float] = lambda: 0.0
    uncleared: UnclearedFunds = field(default_factory=UnclearedFunds)


_OF_NODES = (
    catalogue.NODE_CPU,
    catalogue.NODE_MEMORY,
    catalogue.NODE_ALLOCATIONS,
    catalogue.GPU_MEMORY,
    catalogue.GPU_ALLOCATED,
    *(spec for spec, _ in _READINGS.values()),
)
_COLLECTED = (
    *(each for each in catalogue.CATALOGUE if each.is_of_pool and each not in _OF_NODES),
    catalogue.BUILD,
    catalogue.LEADER,
    catalogue.HEARTBEAT_AGE,
    catalogue.FEED_LAG,
    catalogue.MEMORY_LIMIT,
    catalogue.DISK_FREE,
    catalogue.DISK_RESERVED,
)


class _Families:
    """Gauge families of one scrape, created when first used."""

    def __init__(self) -> None:
        self._found: dict[str, GaugeMetricFamily] = {}

    def add(self, spec: MetricSpec, value: float, *labels: str) -> None:
        family = self._found.get(spec.name)
        if family is None:
            family = self._found[spec.name] = spec.family()
        family.add_metric(labels, value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._found.values())


class ServerCollector(Collector):
    """A server that does not lead exports no metric of the pool: its picture lags behind the leader's."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def describe(self) -> list[Metric]:
        return [spec.family() for spec in _COLLECTED]

    def collect(self) -> Iterator[Metric]:
        observed, families = self._observed, _Families()
        is_leader = observed.is_leader()
        families.add(catalogue.BUILD, 1, observed.version)
        families.add(catalogue.LEADER, int(is_leader))
        families.add(catalogue.HEARTBEAT_AGE, _oldest_heartbeat_s(observed))
        families.add(catalogue.FEED_LAG, observed.feed_lag_s())
        _add_host(families, observed)
        if is_leader:
            _add_queue(families, observed)
            _add_money(families, observed)
            _add_leases(families, observed)
            _add_nodes(families, observed)
        yield from families


class NodeCollector(Collector):
    """Series of single nodes and GPUs, apart from those that alert rules read: they cost most of a scrape."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def describe(self) -> list[Metric]:
        return [spec.family() for spec in _OF_NODES]

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        if self._observed.is_leader():
            for id_, entry in _shown_nodes(self._observed):
                _add_node(families, self._observed, id_, entry)
        yield from families


def collectors(observed: Observed) -> tuple[Collector, ...]:
    return ServerCollector(observed), NodeCollector(observed)


def _shown_nodes(observed: Observed) -> Iterator[tuple[NodeId, NodeState]]:
    """Connected nodes with series of their own: as many as fit into the limit, which counts nodes and GPUs."""
    left = observed.most_gpus
    for id_, entry in observed.picture.state.nodes.items():
        if entry.node is not None and entry.node.connected:
            size = len(entry.node.offer.gpus) + 1
            if size <= left:
                left -= size
                yield id_, entry


def _oldest_heartbeat_s(observed: Observed) -> float:
    nodes: NodeRegistry = observed.picture.nodes
    heard = [nodes.heard_at.get(each.node) for each in nodes.connections]
    oldest = min((at for at in heard if at is not None), default=None)
    return 0.0 if oldest is None else max(0, observed.now() - oldest) / SECOND


def _add_host(families: _Families, observed: Observed) -> None:
    limit = memory_limit_bytes()
    if limit is not None:
        families.add(catalogue.MEMORY_LIMIT, limit)
    free = shutil.disk_usage(observed.data).free
    families.add(catalogue.DISK_FREE, free)
    families.add(catalogue.DISK_RESERVED, observed.min_free_bytes)


@cache
def memory_limit_bytes() -> int | None:
    """Memory limit of this process's control group (version 2), else the machine's memory; None: unknown."""
    found = []
    with suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        for path in (f"/sys/fs/cgroup{own}/memory.max", "/sys/fs/cgroup/memory.max"):
            with suppress(OSError, ValueError):  # "max": no limit
                found.append(int(Path(path).read_text()))
    with suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)


def _add_queue(families: _Families, observed: Observed) -> None:
    families.add(catalogue.QUEUED, observed.picture.waiting)
    survey = observed.survey
    for reason, count in survey.reasons.items():
        families.add(catalogue.QUEUE_REASONS, count, reason)
    for seconds, count in survey.older.items():
        families.add(catalogue.QUEUE_OLDER, count, str(seconds))
    families.add(catalogue.QUEUE_OLDEST, survey.oldest_s)
    families.add(catalogue.ALERTS, survey.firing)


def _add_money(families: _Families, observed: Observed) -> None:
    funds = observed.uncleared
    families.add(catalogue.UNCLEARED, funds.amount)
    age = 0 if funds.oldest_at is None else max(0, observed.now() - funds.oldest_at)
    families.add(catalogue.UNCLEARED_AGE, age / SECOND)


def _add_leases(families: _Families, observed: Observed) -> None:
    state = observed.picture.state
    families.add(catalogue.LEASES_HELD, len(state.held))
    stopping = sum(held.stopping for held in state.stoppable.values())
    running = sum(state.running.values()) - stopping
    families.add(catalogue.ALLOCATIONS, running, "running")
    families.add(catalogue.ALLOCATIONS, stopping, "stopping")


NODE_STATES = ("open", "paused", "draining", "cordoned", "backoff", "disconnected")


def _state_of(node: Node) -> str:
    if not node.connected:
        return "disconnected"
    if node.cordoned:
        return "cordoned"
    if node.availability is Availability.DRAINING:
        return "draining"
    if node.availability is Availability.PAUSED or node.offer.closed:
        return "paused"
    return "backoff" if node.resting else "open"


GPU_STATES = ("free", "shared", "busy", "closed")


def _gpu_state(node: Node, gpu: Gpu, room: GpuRoom) -> str:
    if room.holders:
        return "shared" if room.free_share > 0 else "busy"
    is_closed = gpu.closed or gpu.index in node.gpus_withheld or gpu.index in node.gpus_flagged
    return "closed" if is_closed else "free"


def _add_nodes(families: _Families, observed: Observed) -> None:
    states = Counter(dict.fromkeys(NODE_STATES, 0))
    by_model: dict[str, Counter[str]] = {}
    gpus = 0
    for entry in observed.picture.state.nodes.values():
        node = entry.node
        if node is None:
            continue
        states[_state_of(node)] += 1
        for gpu in node.offer.gpus if node.connected else ():
            gpus += 1
            counts = by_model.setdefault(gpu.model, Counter())
            counts[_gpu_state(node, gpu, entry.room.gpus[gpu.index])] += 1
    for state, count in states.items():
        families.add(catalogue.NODES, count, state)
    _add_models(families, by_model)
    for id_, entry in _shown_nodes(observed):
        for labels, gpu in _gpus_of(id_, entry):
            gpus -= 1
            families.add(catalogue.GPU_HEALTH, gpu.health.weight, *labels)
    families.add(catalogue.GPU_OMITTED, gpus)


def _gpus_of(id_: NodeId, entry: NodeState) -> Iterator[tuple[tuple[str, str, str], Gpu]]:
    """GPUs of a node, each with the values of its labels."""
    assert entry.node is not None
    name = encode("node", id_)
    for gpu in entry.node.offer.gpus:
        yield (name, str(gpu.index), gpu.model), gpu


def _add_models(families: _Families, by_model: Mapping[str, Counter[str]]) -> None:
    ranked = sorted(by_model, key=lambda model: (-by_model[model].total(), model))
    rest: Counter[str] = Counter()
    for model in ranked[MOST_MODELS:]:
        rest.update(by_model[model])
    shown = [(model, by_model[model]) for model in ranked[:MOST_MODELS]]
    for model, counts in [*shown, *([(OTHER, rest)] if rest else [])]:
        for state in GPU_STATES:
            families.add(catalogue.GPUS, counts[state], model, state)


def _add_node(families: _Families, observed: Observed, id_: NodeId, entry: NodeState) -> None:
    assert entry.node is not None
    name, offer, room = encode("node", id_), entry.node.offer, entry.room
    families.add(catalogue.NODE_CPU, 1 - room.free_cpu / max(1, offer.cpu_milli), name)
    families.add(catalogue.NODE_MEMORY, 1 - room.free_memory / max(1, offer.memory_bytes), name)
    families.add(catalogue.NODE_ALLOCATIONS, len(entry.lines), name)
    for labels, gpu in _gpus_of(id_, entry):
        families.add(catalogue.GPU_MEMORY, gpu.memory_bytes, *labels)
        share = room.gpus[gpu.index].free_share
        families.add(catalogue.GPU_ALLOCATED, 1 - share / 1000, *labels)
        point = observed.telemetry.now_of(id_, gpu.index, observed.now())
        for reading, (spec, scale) in _READINGS.items() if point is not None else ():
            value = getattr(point, reading)
            if value is not None:
                families.add(spec, value * scale, *labels)
