"""Deployment of a run with several replicas: their loop, settings, host and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpool.core.errors import Unreachable
from gpool.core.model import Offer
from gpool.testing.simulation import Dice, VirtualLoop, new_loop
from gpool.testing.world.faults import FaultLimits
from gpool.testing.world.host import HostEnvironment
from gpool.testing.world.replicas.faults import (
    ReplicaFaultInjector,
    ReplicaFaultLimits,
    ReplicaFaultPlan,
    draw_replica_faults,
)
from gpool.testing.world.replicas.flaws import SOUND, Planted
from gpool.testing.world.replicas.host import ReplicaHost, ReplicaParts
from gpool.testing.world.replicas.pausing import PausableLoop
from gpool.testing.world.world import WorldOutcome, run
from gpool.wire.documents import TaskRequest

SETTINGS: Mapping[str, Any] = {
    "ttl_s": 9.0,
    "margin_s": 1.5,
    "beat_s": 1.8,
    "replica_timeout_s": 3.0,
}
"""A lease time in proportion to the fixed intervals of the replicas: one second each."""


@dataclass(slots=True)
class Replicas:
    """`Deployment` of `count` replicas."""

    count: int = 3
    parts: ReplicaParts = field(default_factory=ReplicaParts)
    limits: ReplicaFaultLimits = field(default_factory=ReplicaFaultLimits)
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    tolerated: tuple[type[BaseException], ...] = (Unreachable,)
    ends_us: int = 0
    endless: int = 3
    _plan: ReplicaFaultPlan | None = None
    _faults: ReplicaFaultInjector | None = None

    def loop(self) -> VirtualLoop:
        return new_loop(PausableLoop)

    def plan(self, dice: Dice, until_us: int) -> None:
        dice = dice.branch("replica faults")
        self._plan = draw_replica_faults(dice, self.count, until_us, self.limits)
        self.ends_us = self._plan.ends_us

    def host(self, site: HostEnvironment) -> ReplicaHost:
        assert self._plan is not None, "the faults are drawn first"
        host = ReplicaHost(site, self.count, self.parts, self._plan.conditions)
        dice = site.dice.branch("replica injector")
        self._faults = ReplicaFaultInjector(site.loop, site.trace, host, dice)
        return host

    def begin(self, loop: VirtualLoop) -> None:
        assert self._plan is not None
        assert self._faults is not None
        for fault in self._plan.faults:
            loop.after_us(fault.at_us, self._faults.strike, fault)

    def end_all(self) -> None:
        assert self._faults is not None
        self._faults.end_all()

    def offer(self, number: int, offer: Offer) -> Offer:  # noqa: ARG002 - as a `Deployment`
        return offer

    def request(self, request: TaskRequest) -> TaskRequest:
        return request


UNTIL_US = 15_000_000


def run_replicas(
    seed: int, planted: Planted = SOUND, *, count: int = 3, keep_trace: bool = False
) -> WorldOutcome:
    """Run a seed, perhaps with a planted bug, under the faults that show it."""
    limits = ReplicaFaultLimits(only=planted.only)
    deployment = Replicas(count, planted.own, limits)
    nodes = FaultLimits(UNTIL_US, 8, planted.of_nodes)
    return run(seed, planted.common, keep_trace=keep_trace, limits=nodes, deployment=deployment)
