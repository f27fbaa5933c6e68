"""Faults of replicas and their database, drawn from the seed beside those of nodes and networks (`world.faults`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpool.testing.simulation import Dice, Trace, VirtualLoop
from gpool.testing.world.replicas.host import ReplicaConditions, ReplicaHost, ReplicaProcess
from gpool.testing.world.replicas.sessions import FeedConditions

MS = 1_000
S = 1_000_000


class ReplicaFault(StrEnum):
    KILL = "kill"
    KILL_LEADER = "kill_leader"
    PAUSE = "pause"
    PAUSE_LEADER = "pause_leader"  # its clock jumps; writes under way land late
    CUT = "cut"  # off the database
    CUT_LEADER = "cut_leader"
    LOSE_LOCK = (
        "lose_lock"  # the leader's session ends, and it learns so late: two believe they lead
    )
    DRAIN = "drain"
    HOLD_HORIZON = "hold_horizon"  # a transaction of another program stays open
    SLOW_FEED = "slow_feed"


CONDITIONS = ("lost_notify", "lost_answers", "late_commits", "replays", "skew")
LASTS_US: dict[ReplicaFault, tuple[int, int]] = {
    ReplicaFault.KILL: (50 * MS, 6 * S),
    ReplicaFault.KILL_LEADER: (50 * MS, 6 * S),
    ReplicaFault.PAUSE: (300 * MS, 15 * S),
    ReplicaFault.PAUSE_LEADER: (300 * MS, 15 * S),
    ReplicaFault.CUT: (300 * MS, 10 * S),
    ReplicaFault.CUT_LEADER: (300 * MS, 10 * S),
    ReplicaFault.LOSE_LOCK: (100 * MS, 5 * S),
    ReplicaFault.DRAIN: (100 * MS, 2 * S),
    ReplicaFault.HOLD_HORIZON: (500 * MS, 8 * S),
    ReplicaFault.SLOW_FEED: (1 * S, 8 * S),
}
OF_LEADER = (ReplicaFault.KILL_LEADER, ReplicaFault.PAUSE_LEADER, ReplicaFault.CUT_LEADER)


@dataclass(frozen=True, slots=True)
class PlannedReplicaFault:
    at_us: int
    kind: ReplicaFault
    place: int
    lasts_us: int


@dataclass(frozen=True, slots=True)
class ReplicaFaultPlan:
    faults: tuple[PlannedReplicaFault, ...]
    conditions: ReplicaConditions
    ends_us: int


@dataclass(frozen=True, slots=True)
class ReplicaFaultLimits:
    """`only`: the kinds of fault and conditions to draw; none: each seed allows some, as in `world.faults`."""

    most: int = 6
    only: tuple[str, ...] = ()

    def allows(self, name: str, dice: Dice) -> bool:
        return dice.chance(0.5) if not self.only else name in self.only


def draw_replica_faults(
    dice: Dice, replicas: int, until_us: int, limits: ReplicaFaultLimits
) -> ReplicaFaultPlan:
    allowed = [kind for kind in ReplicaFault if limits.allows(kind, dice)]
    faults: list[PlannedReplicaFault] = []
    for _ in range(dice.between(1, limits.most) if allowed else 0):
        kind = dice.pick(allowed)
        at_us = dice.between(500 * MS, until_us)
        lasts_us = dice.between(*LASTS_US[kind])
        faults.append(PlannedReplicaFault(at_us, kind, dice.between(0, replicas - 1), lasts_us))
    faults.sort(key=lambda fault: (fault.at_us, fault.kind.value, fault.place))
    given = {name for name in CONDITIONS if limits.allows(name, dice)}
    feed = FeedConditions(
        notify_lost=dice.pick((0.2, 1.0)) if "lost_notify" in given else 0.0,
        answer_lost=dice.pick((0.005, 0.03)) if "lost_answers" in given else 0.0,
        late=dice.pick((0.02, 0.15)) if "late_commits" in given else 0.0,
    )
    conditions = ReplicaConditions(
        feed=feed,
        skew_us=dice.pick((200 * MS, 3 * S)) if "skew" in given else 0,
        replays=dice.pick((0.2, 0.8)) if "replays" in given else 0.0,
    )
    ends_us = max((fault.at_us + fault.lasts_us for fault in faults), default=0)
    return ReplicaFaultPlan(tuple(faults), conditions, ends_us)


class ReplicaFaultInjector:
    def __init__(self, loop: VirtualLoop, trace: Trace, host: ReplicaHost, dice: Dice) -> None:
        self._loop, self._trace, self._host, self._dice = loop, trace, host, dice

    def strike(self, fault: PlannedReplicaFault) -> None:
        self._trace.say("world", "strikes", fault.kind, fault.place, fault.lasts_us)
        over_us = self._loop.us + fault.lasts_us
        if fault.kind is ReplicaFault.HOLD_HORIZON:
            xid = self._host.database.begin()
            self._loop.after_us(fault.lasts_us, self._host.database.roll_back, xid)
            return
        struck = self._struck(fault)
        if struck is None:
            return
        match fault.kind:
            case ReplicaFault.KILL | ReplicaFault.KILL_LEADER:
                self._host.kill(struck)
                self._loop.after_us(fault.lasts_us, self._host.start_at, struck.place)
            case ReplicaFault.PAUSE | ReplicaFault.PAUSE_LEADER:
                self._host.pause(struck, fault.lasts_us)
            case ReplicaFault.CUT | ReplicaFault.CUT_LEADER:
                struck.path.cut_until_us = max(struck.path.cut_until_us, over_us)
            case ReplicaFault.LOSE_LOCK:
                self._lose_lock(over_us)
            case ReplicaFault.DRAIN:
                self._host.drain(struck, fault.lasts_us)
            case ReplicaFault.SLOW_FEED:
                struck.path.slow_until_us = max(struck.path.slow_until_us, over_us)

    def _struck(self, fault: PlannedReplicaFault) -> ReplicaProcess | None:
        if fault.kind in OF_LEADER or fault.kind is ReplicaFault.LOSE_LOCK:
            leaders = self._host.leaders
            return leaders[0] if leaders else None
        return next((each for each in self._host.alive if each.place == fault.place), None)

    def _lose_lock(self, over_us: int) -> None:
        database = self._host.database
        for leader in self._host.leaders:
            pid = database.locked_by
            if pid is not None and pid == leader.membership._lock.pid:
                leader.path.blind_until_us = over_us
                database.end(pid)

    def end_all(self) -> None:
        for each in self._host.alive:
            self._host.resume(each)
        self._host.start()
