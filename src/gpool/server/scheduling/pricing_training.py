"""Learns once a day how room is to be priced, from what was submitted lately. `core.scheduling.portfolio` decides; this asks it.

The replays take minutes of a processor. They run in a process of their own, `python -m gpool.server.scheduling.pricing_training`, with the
lowest priority and a limit of processor time; it reads the question from its standard input, answers on its output and
touches nothing else. The answer is kept among the rules, so that a restart, and every replica, has it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from gpool.core.model import Instant, Node, Shape
from gpool.core.scheduler.order.limits import least_gpus
from gpool.core.scheduler.place.portfolio import LEAST_ARRIVALS, PLAIN, Learnt, learn
from gpool.server.settings import span
from gpool.server.store.operations.operators import rules as rules_operations
from gpool.server.store.operations.tasks import submissions
from gpool.server.wakeups import Wake

if TYPE_CHECKING:
    from gpool.server.server import Server

log = logging.getLogger(__name__)

LOOK_EVERY_S = 3600.0
MOST_TASKS = 100_000
"""Looked at in the store."""

CPU_S = 1800
"""Of the learning process; then the kernel ends it."""

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Question(msgspec.Struct, frozen=True):
    """A pool and what came to it, oldest first: (which of `shapes`, how many)."""

    nodes: tuple[Node, ...]
    shapes: tuple[Shape, ...]
    arrivals: tuple[tuple[int, int], ...]
    at: Instant

    @classmethod
    def of(cls, nodes: tuple[Node, ...], came: list[tuple[Shape, int]], at: Instant) -> Question:
        places: dict[Shape, int] = {}
        found = tuple((places.setdefault(shape, len(places)), count) for shape, count in came)
        return cls(nodes, tuple(places), found, at)

    def answer(self) -> Learnt | None:
        came = [self.shapes[place] for place, count in self.arrivals for _ in range(count)]
        return learn(self.nodes, came, self.at)


class Asking:
    """An operator's wish to have it learnt now."""

    def __init__(self) -> None:
        self.wake = Wake()
        self.wanted = False

    def ask(self) -> None:
        self.wanted = True
        self.wake.call()


class Learn:
    """The loop. It looks every hour whether what is known is a day old."""

    name = "learn"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._asking = server.learning
        self.wake = self._asking.wake
        self.every_s = min(LOOK_EVERY_S, max(1.0, server.settings.learn_every_s))
        tell(server, server.scheduler.rules.learnt)

    async def run_once(self, now: Instant) -> None:
        server, wanted = self._server, self._asking.wanted
        self._asking.wanted = False
        known = server.scheduler.rules.learnt
        every = server.settings.learn_every_s
        if not wanted and (not every or (known is not None and now - known.at < span(every))):
            return
        asked = await self._question(now)
        found = None if asked is None else await answered(asked)
        if found is None:
            if wanted:
                log.info("there is too little to learn a pricing from yet")
            return
        await server.write(rules_operations.put_learnt(found, now))
        rules = await server.store.read(rules_operations.rules())
        server.scheduler.use_rules(rules, server.now)
        tell(server, found)
        log.info("%s", sentence(found))

    async def _question(self, now: Instant) -> Question | None:
        """None: nobody asked for GPUs often enough, or there are none."""
        nodes = tuple(
            replace(entry.node, connected=True)
            for entry in self._server.scheduler.state.nodes.values()
            if entry.node is not None and entry.node.offer.gpus
        )
        if not nodes:
            return None
        came = await self._server.store.read(submissions.recent_shapes(MOST_TASKS))
        asks = sum(count for shape, count in came if least_gpus(shape))
        return Question.of(nodes, came, now) if asks >= 2 * LEAST_ARRIVALS else None


def tell(server: Server, learnt: Learnt | None) -> None:
    """The metric."""
    if learnt is not None:
        plain = learnt.of(PLAIN)
        server.metrics.learnt_at.set(learnt.at / 1e6)
        server.metrics.replayed.labels("chosen").set(_idle(learnt))
        server.metrics.replayed.labels("plain").set(plain if plain is not None else _idle(learnt))


def sentence(learnt: Learnt) -> str:
    """For the log and for operators."""
    plain = learnt.of(PLAIN)
    beside = "" if plain is None else f", plain fragmentation gradient descent {plain:.2f} %"
    weights = learnt.pricing.weights
    return (
        f"room is priced by fragmentation {weights.fragmentation}, remnants {weights.remnants}, stranding "
        f"{weights.stranding} in steps of {weights.step}: on the later half of {learnt.arrivals} arrivals it leaves "
        f"{_idle(learnt):.2f} % of the GPUs idle{beside}"
    )


def _idle(learnt: Learnt) -> float:
    found = learnt.of(learnt.pricing.weights)
    assert found is not None, "what is taken was judged"
    return found


# ---- the process


async def answered(asked: Question) -> Learnt | None:
    """None: too little to learn from, or the process came to no end; it is tried again in an hour."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gpool.server.scheduling.pricing_training",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        told, _ = await process.communicate(msgspec.msgpack.encode(asked))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        log.warning("learning a pricing ended with %d; it is tried again later", process.returncode)
        return None
    return msgspec.msgpack.decode(told, type=Learnt | None)


def main() -> None:
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.msgpack.encode(asked.answer()))


if __name__ == "__main__":
    main()
