"""Published placement policies, as references to measure beside: random, first fit, best fit, dot product, and FGD as its authors wrote it.

They work on bare arrays and need not answer for users, lines or limits, so their speed is not that of a planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
from bench.openb import Pod
from numpy.typing import NDArray

from gpool.core.model import Node

GPU = 1000
POPULAR = 0.95
Taken = tuple[int, tuple[int, ...]]


class Cluster:
    """Free amounts by node, in the order of node names."""

    def __init__(self, nodes: list[Node]) -> None:
        offers = [node.offer for node in nodes]
        width = max(len(offer.gpus) for offer in offers)
        self.cpu = np.array([offer.cpu_milli for offer in offers])
        self.memory = np.array([offer.memory_bytes for offer in offers])
        self.free = np.array(
            [[GPU] * len(o.gpus) + [0] * (width - len(o.gpus)) for o in offers], np.int64
        )
        self.total = self.free.sum(1)
        self.model = np.array([o.gpus[0].model if o.gpus else "" for o in offers])
        self.version = np.zeros(len(nodes), np.int64)

    def allowed(self, pod: Pod) -> NDArray[np.bool_]:
        return np.isin(self.model, list(pod.models)) if pod.models else np.ones(len(self.cpu), bool)

    def able(self, pod: Pod) -> NDArray[np.intp]:
        needs = pod.shape.requirements
        ok = (self.cpu >= needs.cpu_milli) & (self.memory >= (needs.memory_bytes or 0))
        if pod.gpus:
            ok &= (self.free >= pod.share_milli).sum(1) >= pod.gpus
            if pod.models:
                ok &= self.allowed(pod)
        return np.flatnonzero(ok)

    def gpus_for(self, pod: Pod, node: int) -> tuple[int, ...]:
        fit = np.flatnonzero(self.free[node] >= pod.share_milli)
        if pod.gpus == 1:
            return (int(fit[self.free[node, fit].argmin()]),)
        return tuple(int(i) for i in fit[: pod.gpus])

    def take(self, pod: Pod, node: int, gpus: tuple[int, ...], sign: int = 1) -> None:
        needs = pod.shape.requirements
        self.cpu[node] -= sign * needs.cpu_milli
        self.memory[node] -= sign * (needs.memory_bytes or 0)
        self.free[node, list(gpus)] -= sign * pod.share_milli
        self.total[node] -= sign * pod.gpu_milli
        self.version[node] += 1


Choose = Callable[[Cluster, Pod, NDArray[np.intp]], Taken]


def random_fit(pods: list[Pod], cluster: Cluster, random: Random) -> Choose:  # noqa: ARG001 - a reference
    def choose(cluster: Cluster, pod: Pod, able: NDArray[np.intp]) -> Taken:
        node = int(random.choice(able))
        fit = np.flatnonzero(cluster.free[node] >= pod.share_milli)
        if pod.gpus == 1:
            return node, (int(random.choice(fit)),)
        return node, cluster.gpus_for(pod, node)

    return choose


def _by(score: Callable[[Cluster, Pod, NDArray[np.intp]], NDArray[np.int64]]) -> Choose:
    def choose(cluster: Cluster, pod: Pod, able: NDArray[np.intp]) -> Taken:
        node = int(able[score(cluster, pod, able).argmax()])
        return node, cluster.gpus_for(pod, node)

    return choose


def first_fit(pods: list[Pod], cluster: Cluster, random: Random) -> Choose:  # noqa: ARG001 - a reference
    return _by(lambda cluster, pod, able: -able)  # noqa: ARG005 - a score


def best_fit(pods: list[Pod], cluster: Cluster, random: Random) -> Choose:  # noqa: ARG001 - a reference
    def score(cluster: Cluster, pod: Pod, able: NDArray[np.intp]) -> NDArray[np.int64]:
        cpu = (cluster.cpu[able] - pod.shape.requirements.cpu_milli) / 128_000
        gpu = (cluster.total[able] - pod.gpu_milli) / (8 * GPU)
        return np.asarray(100 * (1 - 0.5 * cpu - 0.5 * gpu), np.int64)

    return _by(score)


def dot_product(pods: list[Pod], cluster: Cluster, random: Random) -> Choose:  # noqa: ARG001 - a reference
    def score(cluster: Cluster, pod: Pod, able: NDArray[np.intp]) -> NDArray[np.int64]:
        cpu = cluster.cpu[able] / 128_000 * (pod.shape.requirements.cpu_milli / 128_000)
        gpu = cluster.total[able] / (8 * GPU) * (pod.gpu_milli / (8 * GPU))
        return np.asarray(100 * (1 - (cpu + gpu) / 2), np.int64)

    return _by(score)


class Fgd:
    """Fragmentation gradient descent: the score is a sigmoid cut to 0 … 100, equal scores go to the first name."""

    def __init__(self, pods: list[Pod], cluster: Cluster, random: Random) -> None:
        counts: Counter[tuple[int, int, int, frozenset[str]]] = Counter()
        for pod in pods:
            counts[pod.shape.requirements.cpu_milli, pod.gpus, pod.share_milli, pod.models] += 1
        chosen, covered = [], 0
        for key, count in counts.most_common():
            chosen.append((key, count))
            covered += count
            if covered >= POPULAR * len(pods):
                break
        self.cpu = np.array([key[0] for key, _ in chosen])
        self.gpus = np.array([key[1] for key, _ in chosen])
        self.weight = np.array([count for _, count in chosen], float) / covered
        self.sizes, self.of = np.unique([key[2] for key, _ in chosen], return_inverse=True)
        self.could = np.array(
            [
                np.isin(cluster.model, list(key[3])) if key[3] else np.ones(len(cluster.cpu), bool)
                for key, _ in chosen
            ]
        ).T & (self.gpus > 0)
        self.rows: dict[int, tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.int64]]] = {}
        self.before = np.zeros(len(cluster.cpu))
        self.read = np.full(len(cluster.cpu), -1)

    def fragments(
        self, nodes: NDArray[np.intp], cpu: NDArray[np.int64], free: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        enough = free[:, None, :] >= self.sizes[:, None]
        small = (free[:, None, :] * ~enough).sum(2)
        can = (enough.sum(2)[:, self.of] >= self.gpus) & (cpu[:, None] >= self.cpu)
        can &= self.could[nodes]
        lost = np.where(can, small[:, self.of], free.sum(1)[:, None])
        return np.asarray(lost @ self.weight)

    def score(self, c: Cluster, pod: Pod, nodes: NDArray[np.intp]) -> None:
        scores, gpus, _ = self.rows[pod.number]
        stale = nodes[self.read[nodes] != c.version[nodes]]
        if len(stale):
            self.before[stale] = self.fragments(stale, c.cpu[stale], c.free[stale])
            self.read[stale] = c.version[stale]
        free = c.free[nodes]
        is_share = pod.gpus == 1 and pod.share_milli < GPU
        if is_share:
            at, gpu = np.nonzero(free >= pod.share_milli)
        else:
            at, gpu = np.arange(len(nodes)), np.zeros(len(nodes), np.intp)
        after = free[at]
        if is_share:
            after[np.arange(len(at)), gpu] -= pod.share_milli
        else:
            idle = after == GPU
            after[idle & (idle.cumsum(1) <= pod.gpus)] = 0
        cpu = c.cpu[nodes][at] - pod.shape.requirements.cpu_milli
        gain = self.before[nodes][at] - self.fragments(nodes[at], cpu, after)
        cut = np.floor(100 / (1 + np.exp(-gain / GPU)))
        order = np.lexsort((gpu, -cut, at))
        first = order[np.unique(at[order], return_index=True)[1]]
        scores[nodes], gpus[nodes] = cut[first], gpu[first]

    def __call__(self, c: Cluster, pod: Pod, able: NDArray[np.intp]) -> Taken:
        if pod.number not in self.rows:
            size = len(c.cpu)
            self.rows[pod.number] = np.zeros(size), np.zeros(size, np.intp), np.full(size, -1)
        scores, gpus, read = self.rows[pod.number]
        stale = able[read[able] != c.version[able]]
        if len(stale):
            self.score(c, pod, stale)
            read[stale] = c.version[stale]
        node = int(able[scores[able].argmax()])
        if pod.gpus == 1 and pod.share_milli < GPU:
            return node, (int(gpus[node]),)
        return node, c.gpus_for(pod, node)


REFERENCES: dict[str, Callable[[list[Pod], Cluster, Random], Choose]] = {
    "Random": random_fit,
    "First-fit": first_fit,
    "Best-fit": best_fit,
    "Dot-product": dot_product,
    "FGD": Fgd,
}
