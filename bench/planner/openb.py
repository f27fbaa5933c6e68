"""The openb traces (Alibaba, v2023) as gpool's nodes and requirements, and the order in which a run's tasks arrive.

Protocol: *fill*: all tasks of the trace in random order, then more of them at random until 130 % of the GPUs are asked for; what
fits nowhere is refused; nothing ends. *churn*: Poisson arrivals at 130 % load, exponential run times.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gpool.core.ids import NodeId, UserId
from gpool.core.model import GIB, MIB, Gpu, GpuRequest, Node, Offer, Requirements, Shape, TaskKind

LOAD = 1.3
CARD_GIB = {"P100": 16, "T4": 16, "V100M16": 16, "V100M32": 32, "A10": 24}
"""G2 and G3 are names of the trace; their size is not published and does not matter here."""

USER = UserId(1)


@dataclass(frozen=True, slots=True)
class Machine:
    cpu_milli: int
    memory_bytes: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One distinct request of the trace."""

    number: int
    shape: Shape
    models: frozenset[str]
    gpus: int
    share_milli: int  # of each

    @property
    def gpu_milli(self) -> int:
        return self.gpus * self.share_milli


def rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from csv.DictReader(lines)


def read_machines(path: Path) -> list[Machine]:
    return [
        Machine(int(r["cpu_milli"]), int(r["memory_mib"]) * MIB, int(r["gpu"]), r["model"])
        for r in sorted(rows(path), key=lambda r: r["sn"])
    ]


def read_pods(path: Path) -> list[Pod]:
    """All tasks of a trace; equal requests are one object."""
    known: dict[tuple[object, ...], Pod] = {}
    pods = []
    for row in sorted(rows(path), key=lambda r: r["name"]):
        gpus = int(row["num_gpu"])
        share = min(int(row["gpu_milli"]), 1000) if gpus else 0
        models = tuple(dict.fromkeys((row.get("gpu_spec") or "").split("|"))) if gpus else ("",)
        key = (int(row["cpu_milli"]), int(row["memory_mib"]), gpus, share, models)
        if key not in known:
            requests = tuple(GpuRequest(gpus, m or None, share_milli=share) for m in models)
            needs = Requirements(requests if gpus else (), key[0], key[1] * MIB)
            shape = Shape(USER, needs, 0, TaskKind.COMMAND, "default", "pod")
            named = frozenset(m for m in models if m)
            known[key] = Pod(len(known), shape, named, gpus, share)
        pods.append(known[key])
    return pods


def as_nodes(machines: list[Machine], random: Random, copies: int = 1) -> list[Node]:
    """Names and ids in random order: no tie may be decided by how the trace was sorted."""
    every = machines * copies
    ids = list(range(1, len(every) + 1))
    random.shuffle(ids)
    nodes = []
    for id_, machine in zip(ids, every, strict=True):
        memory = CARD_GIB.get(machine.model, 32) * GIB
        gpus = tuple(
            Gpu(index, f"GPU-{id_}-{index}", machine.model, "nvidia", memory)
            for index in range(machine.gpus)
        )
        offer = Offer(machine.cpu_milli, machine.memory_bytes, GIB, gpus)
        nodes.append(Node(NodeId(id_), UserId(2), f"node{id_}", offer))
    nodes.sort(key=lambda node: node.id)
    return nodes


def arrivals(pods: list[Pod], capacity_milli: int, random: Random) -> list[Pod]:
    """One run of *fill*."""
    order = list(pods)
    random.shuffle(order)
    asked, limit = sum(pod.gpu_milli for pod in order), LOAD * capacity_milli
    while asked > limit:
        asked -= order.pop(random.randrange(len(order))).gpu_milli
    while True:
        pod = random.choice(pods)
        if asked + pod.gpu_milli > limit:
            return order
        asked += pod.gpu_milli
        order.append(pod)
