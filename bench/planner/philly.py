"""The Philly trace as jobs, and the pool it is replayed on. It reads; it decides nothing."""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpool.core.ids import NodeId, UserId
from gpool.core.model import GIB, Gpu, GpuRequest, Node, Offer, Requirements, Shape, TaskKind

GPUS = 8  # of a node
MODEL = "Tesla P100"
OCTOBER = ("2017-10-02", "2017-10-30")
OTHER_WEEKS = ("2017-10-30", "2017-12-11")


@dataclass(slots=True)
class Job:
    """`at` and `end` in seconds from the first day; `left` is what it still has to run."""

    number: int
    at: float
    seconds: float
    gpus: int
    cluster: str
    left: float = 0.0
    end: float = 0.0
    stops: int = 0

    @property
    def wait(self) -> float:
        return max(0.0, self.end - self.at - self.seconds)


def read_jobs(trace: Path, first: str, last: str) -> list[Job]:
    """Those submitted from the first day until before the last."""
    packed = trace.read_bytes()
    text = (gzip.decompress(packed) if trace.suffix == ".gz" else packed).decode()
    start, stop = _day(first), _day(last)
    found = []
    for row in csv.DictReader(io.StringIO(text)):
        at = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC)
        seconds, gpus = float(row["duration"]), int(row["num_gpus"])
        if start <= at < stop and seconds > 0 and gpus > 0:
            found.append(((at - start) / timedelta(seconds=1), seconds, gpus, row["cluster"]))
    found.sort(key=lambda row: row[0])
    return [Job(number, *row, left=row[1]) for number, row in enumerate(found)]


def _day(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def as_nodes(count: int) -> list[Node]:
    gpus = tuple(Gpu(i, f"GPU-{i}", MODEL, "nvidia", 16 * GIB) for i in range(GPUS))
    offer = Offer(
        GPUS * 1000, 512 * GIB, 1024 * GIB, gpus, site="philly", address="10.0.0.1", gang_port=7000
    )
    return [Node(NodeId(n), UserId(1), f"node{n}", offer) for n in range(1, count + 1)]


def shape_of(job: Job, user: int, team: int | None, *, preemptible: bool) -> Shape:
    """Up to eight GPUs on one node; more on whole nodes, or evenly where they do not come out whole."""
    nodes = -(-job.gpus // GPUS)
    gpus = job.gpus // nodes
    needs = Requirements((GpuRequest(gpus),), gpus * 1000, gpus * GIB, nodes=nodes)
    return Shape(UserId(user), needs, 0, TaskKind.COMMAND, "default", "train", team, preemptible)
