"""Test oracle of the World: running, durable and acknowledged facts; each invariant is checked when they change.

Shares no code with the components it checks. One file: all invariants of a run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpool.core.model import Allocation, EndReason, Offer, TaskStatus
from gpool.wire import frames

RELEASE_BOUND_US = 600_000
"""Time after a thaw within which a lease that ended during the freeze may still run."""


_MARK = re.compile(r"\d+\.\d+\.\w+\.\d+")
_RANK = re.compile(r"^\[\d+\] ")  # prefix of a line printed by a gang's member


def mark_of(value: bytes, text: str) -> str:
    """Mark (`machine.tag`) in a result; empty if the result is not the attempt's own."""
    found = value.decode() if value else text
    return found if _MARK.fullmatch(found) else ""


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    rank: int
    node: str
    holding: bool
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """Task as stored; a gang has the members of its last lease, and no node of its own."""

    task: int
    batch: int
    submission: str  # name of its spec, unique for each submission
    status: TaskStatus
    epoch: int
    node: str | None
    holding: bool
    allocation: Allocation | None
    reason: str | None
    exit_code: int | None
    mark: str  # of the attempt whose result it is: `machine.tag`
    sequence: int | None  # in its batch's results
    tries: int = 0
    members: tuple[MemberSnapshot, ...] = ()

    @property
    def places(self) -> dict[str, Allocation]:
        if self.members:
            return {member.node: member.allocation for member in self.members}
        if self.node is None or self.allocation is None:
            return {}
        return {self.node: self.allocation}

    @property
    def is_new(self) -> bool:
        """As a submission writes it: queued, or leased for the first time in the same commit."""
        if self.status is TaskStatus.LEASED:
            return self.epoch == 1 and self.holding and self.tries == 0
        return self.status is TaskStatus.QUEUED and self.epoch == 0

    def holds_at(self, node: str, epoch: int) -> bool:
        if not self.holding or self.epoch != epoch:
            return False
        if self.members:
            return any(member.node == node and member.holding for member in self.members)
        return self.node == node

    @property
    def result(self) -> tuple[object, ...]:
        return (self.status, self.epoch, self.reason, self.exit_code, self.mark, self.sequence)


@dataclass(slots=True)
class MachineTruth:
    offer: Offer
    frozen: bool = False
    thawed_us: int = -(10**9)
    running: dict[tuple[int, int], tuple[Allocation, object]] = field(default_factory=dict)
    begun: set[tuple[int, int]] = field(default_factory=set)  # by this start of its agent
    preempted: set[tuple[int, int]] = field(default_factory=set)  # by this start, then preempted
    runners: dict[tuple[int, int], Allocation] = field(default_factory=dict)
    kept: int = 0  # leases that a malicious node did not end

    def keep(self) -> None:
        self.kept += 1

    def booted(self) -> None:
        """Forget attempts of the last start: the server may grant unreported ones again."""
        self.begun.clear()
        self.preempted.clear()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self, now_us: int) -> None:
        self.frozen, self.thawed_us = False, now_us


class Oracle:
    def __init__(self, now_us: Callable[[], int], fail: Callable[[str], None]) -> None:
        self._now_us = now_us
        self._fail = fail
        self.nodes: dict[str, MachineTruth] = {}
        self.rows: Mapping[int, TaskSnapshot] = {}
        self.asked: dict[str, int] = {}  # tasks by submission
        self.wanted: dict[str, int] = {}  # nodes of each task by submission, if several
        self.done: dict[tuple[int, int], set[str]] = {}  # members that succeeded, by gang and epoch
        self.promised: dict[int, str] = {}  # acknowledged task -> submission
        self.saved: Mapping[int, int] = {}  # progress in the durable checkpoints
        self.acknowledged: dict[int, int] = {}  # progress of acknowledged checkpoints
        self.attempts = 0
        self.accepted = 0
        self.resumed = 0
        self.gangs = 0  # that succeeded

    # ---- machines

    def node(self, name: str, offer: Offer) -> MachineTruth:
        return self.nodes.setdefault(name, MachineTruth(offer))

    def _excused(self, node: MachineTruth) -> bool:
        """Whether the machine was frozen until just now and could not release its leases."""
        return node.frozen or self._now_us() - node.thawed_us <= RELEASE_BOUND_US

    def attempt_began(
        self, name: str, task: int, epoch: int, allocation: Allocation, sandbox: object = None
    ) -> None:
        node = self.nodes[name]
        self.attempts += 1
        who = f"task {task} epoch {epoch} on {name}"
        if (task, epoch) in (node.running if sandbox else node.begun):
            self._fail(f"{who} was started twice")  # a call may be, if its runner was ended
        if (task, epoch) in node.preempted:
            self._fail(f"{who} was preempted, and started again")
        node.begun.add((task, epoch))
        row = self.rows.get(task)
        if row is None or row.epoch < epoch:
            self._fail(f"{who} was started, and no such lease is durable")
        elif not self._excused(node) and self._is_over(name, task, epoch):
            self._fail(f"{who} was started under a lease that is over: {row}")
        if not self._excused(node):
            for other, truth in self.nodes.items():
                twins = [
                    e
                    for t, e in truth.running
                    if t == task and not (e == epoch and other != name and self._is_gang(task))
                ]
                if twins and not self._excused(truth):
                    self._fail(f"{who} was started while {other} runs its epoch {twins[0]}")
        if row is not None and row.epoch == epoch:
            # a runner may have moved to another number since it began
            allocation = row.places.get(name, allocation)
        node.running[task, epoch] = (allocation, sandbox)
        self._check_room(name, node)

    def resumed_from(self, task: int, epoch: int, progress: int) -> None:
        self.resumed += progress > 0
        safe = self.acknowledged.get(task, 0)
        if progress < safe:
            self._fail(
                f"task {task} epoch {epoch} began at {progress}, and {safe} was acknowledged"
            )

    def attempt_preempted(self, name: str, task: int, epoch: int) -> None:
        self.nodes[name].preempted.add((task, epoch))

    def attempt_ended(self, name: str, task: int, epoch: int) -> None:
        self.nodes[name].running.pop((task, epoch), None)

    def sandbox_opened(self, name: str, key: tuple[int, int], allocation: Allocation) -> None:
        self.nodes[name].runners[key] = allocation
        self._check_room(name, self.nodes[name])

    def sandbox_closed(self, name: str, key: tuple[int, int]) -> None:
        self.nodes[name].runners.pop(key, None)

    def _check_room(self, name: str, node: MachineTruth) -> None:
        """Check that everything running fits the machine, slice by slice; an idle runner still holds its slices.

        After a freeze past its lease, an attempt being killed may still use processors, never a GPU slice; its allocation
        is unknown, since its runner may have moved.
        """
        excused = self._excused(node)
        current, over = [], []
        for (task, epoch), (allocation, _) in node.running.items():
            if excused and self._is_over(name, task, epoch):
                over.append(replace(allocation, cpu_milli=0, memory_bytes=0))
            else:
                current.append(allocation)
        in_use = [sandbox for _, sandbox in node.running.values()]
        idle = [
            replace(allocation, cpu_milli=0, memory_bytes=0)
            for sandbox, allocation in node.runners.items()
            if allocation.slices and sandbox not in in_use
        ]
        problem = overfull(node.offer, [*current, *over, *idle])
        if problem:
            self._fail(f"{name}: {problem} by what runs there: {sorted(node.running)}")
        numbers = [allocation.number for allocation in current]
        if len(set(numbers)) < len(numbers):
            self._fail(f"{name}: two tasks of one allocation run at once: {sorted(node.running)}")

    def _fail_if(self, problem: str | None) -> None:
        if problem is not None:
            self._fail(problem)

    def _is_over(self, name: str, task: int, epoch: int) -> bool:
        row = self.rows.get(task)
        return row is None or not row.holds_at(name, epoch)

    def _is_gang(self, task: int) -> bool:
        row = self.rows.get(task)
        return row is not None and self.wanted.get(row.submission, 1) > 1

    # ---- stored rows

    def absorb(self, rows: Mapping[int, TaskSnapshot]) -> None:
        before = self.rows
        self.rows = rows
        touched: set[str] = set()
        for task, row in rows.items():
            old = before.get(task)
            if old is row or old == row:
                continue
            touched.update(row.places)
            sites = {self.nodes[name].offer.site for name in row.places}
            self._fail_if(_gang_problem(row, self.wanted.get(row.submission, 1), sites))
            if old is None:
                if not row.is_new:
                    self._fail(f"a new task is neither queued nor leased once: {row}")
            else:
                self._check_move(old, row)
        if len(rows) < len(before) or before.keys() - rows.keys():
            self._fail(f"tasks vanished: {sorted(before.keys() - rows.keys())}")
        if len(rows) > len(before):
            counts = Counter(row.submission for row in rows.values())
            for submission, count in counts.items():
                if count > self.asked.get(submission, 0):
                    self._fail(f"{submission} has {count} tasks, not {self.asked.get(submission)}")
        for name in sorted(touched):
            self._check_granted(name)

    def checkpointed(self, saved: Mapping[int, int]) -> None:
        for task, progress in self.saved.items():
            if saved.get(task, progress) < progress:
                self._fail(f"the checkpoint of task {task} went from {progress} to {saved[task]}")
        self.saved = saved

    def _check_move(self, old: TaskSnapshot, row: TaskSnapshot) -> None:
        went = old.node is not None and (old.task, old.epoch) in self.nodes[old.node].preempted
        if (
            went
            and not old.status.is_final
            and row.reason != EndReason.OUT_OF_FUNDS
            and (row.status is TaskStatus.FAILED or row.tries > old.tries)
        ):
            self._fail(f"a preempted attempt was counted as a failure: {old} became {row}")
        if old.status.is_final and row.result != old.result:
            self._fail(f"a result changed after it was accepted: {old} became {row}")
        if row.epoch < old.epoch:
            self._fail(f"an epoch went back: {old} became {row}")
        for name in old.places:
            if old.holds_at(name, old.epoch) and not row.holds_at(name, old.epoch):
                node = self.nodes[name]
                if (old.task, old.epoch) in node.running and not self._excused(node):
                    self._fail(
                        f"{name} still runs task {old.task} epoch {old.epoch}, and its slot is free"
                    )
        if row.status.is_final and not old.status.is_final:
            self.accepted += 1
            self.gangs += self._is_gang(row.task) and row.status is TaskStatus.SUCCEEDED
            if row.mark:
                self._fail_if(_mark_problem(old, row))

    def logged(self, before: Mapping[int, TaskSnapshot], task: int, line: str) -> None:
        of, epoch = _RANK.sub("", line).split(".")[:2]
        rows = [row for row in (before.get(task), self.rows.get(task)) if row is not None]
        if int(of) != task or not any(row.epoch == int(epoch) for row in rows):
            self._fail(f"output of epoch {epoch} of task {of} was accepted for {rows}")

    def _check_granted(self, name: str) -> None:
        held: dict[int, Allocation] = {}
        for row in self.rows.values():
            mine = row.places.get(name) if row.holding else None
            if mine is None:
                continue
            if row.members and mine.number in held:
                self._fail(f"{name}: a gang's allocation is another task's too: {row}")
            if held.setdefault(mine.number, mine) != mine:
                self._fail(f"{name}: two allocations are number {mine.number}: {row}")
        problem = overfull(self.nodes[name].offer, list(held.values()))
        if problem:
            self._fail(f"{name}: {problem} by its leases")

    # ---- acknowledgements

    def submission_begins(self, submission: str, tasks: int, nodes: int) -> None:
        self.asked[submission] = tasks
        if nodes > 1:
            self.wanted[submission] = nodes

    def submission_acknowledged(self, submission: str, tasks: Sequence[int]) -> None:
        if len(tasks) != self.asked[submission]:
            self._fail(f"{submission} was answered with {len(tasks)} tasks")
        for task in tasks:
            known = self.promised.setdefault(task, submission)
            if known != submission:
                self._fail(f"task {task} was given to {known} and to {submission}")
            if task not in self.rows:
                self._fail(f"task {task} of {submission} was acknowledged and is not durable")

    def grants_received(self, name: str, tasks: Sequence[tuple[int, int]]) -> None:
        for task, epoch in tasks:
            row = self.rows.get(task)
            if row is None or row.epoch < epoch:
                self._fail(
                    f"{name} was granted task {task} epoch {epoch}, which is not durable: {row}"
                )
            elif row.epoch == epoch and row.places and name not in row.places:
                self._fail(f"{name} was granted task {task} epoch {epoch} of another node: {row}")

    def report_acknowledged(self, name: str, item: frames.ReportItem, *, refused: bool) -> None:
        row = self.rows.get(item.task)
        what = f"{type(item).__name__} of task {item.task} epoch {item.epoch} by {name}"
        if row is None:
            self._fail(f"{what} was acknowledged for a task that is not there")
            return
        if isinstance(item, frames.Checkpointed) and not refused:
            progress = int(item.files[0].sha256, 16)
            self.acknowledged[item.task] = max(progress, self.acknowledged.get(item.task, 0))
            if self.saved.get(item.task, 0) < progress:
                self._fail(f"{what} was acknowledged, and {self.saved.get(item.task)} is durable")
        if isinstance(
            item,
            frames.LogChunk
            | frames.Started
            | frames.Reached
            | frames.Checkpointed
            | frames.Progressed,
        ):
            return
        if row.holds_at(name, item.epoch):
            self._fail(
                f"{what} was {'refused' if refused else 'acknowledged'}, and it holds: {row}"
            )
        good = isinstance(item, frames.Finished) and (
            item.reason is EndReason.RETURNED
            or (item.reason is EndReason.EXITED and item.exit_code == 0)
        )
        if self._is_gang(item.task):
            if good and not refused:
                self._member_done(name, item.task, item.epoch, row)
        elif not refused and good and row.status is not TaskStatus.CANCELLED:
            mine = row.mark.startswith(f"{item.task}.{item.epoch}.{name}.")
            if row.status is not TaskStatus.SUCCEEDED or not mine:
                self._fail(f"{what} was acknowledged, and the result is not there: {row}")

    def _member_done(self, name: str, task: int, epoch: int, row: TaskSnapshot) -> None:
        done = self.done.setdefault((task, epoch), set())
        done.add(name)
        if row.status is TaskStatus.CANCELLED or len(done) < self.wanted[row.submission]:
            return
        if row.status is not TaskStatus.SUCCEEDED:
            self._fail(f"all members of task {task} epoch {epoch} ended well, and it is {row}")

    def cancel_acknowledged(self, task: int) -> None:
        if not self.rows[task].status.is_final:
            self._fail(f"the cancel of task {task} was acknowledged: {self.rows[task]}")

    def result_seen(self, task: int, status: str, mark: str) -> None:
        row = self.rows[task]
        if (row.status.value, row.mark) != (status, mark):
            self._fail(f"a consumer saw {status} {mark!r}, durable is {row}")


def overfull(offer: Offer, allocations: Sequence[Allocation]) -> str:
    if sum(a.cpu_milli for a in allocations) > offer.cpu_milli:
        return "processors are overcommitted"
    if sum(a.memory_bytes for a in allocations) > offer.memory_bytes:
        return "memory is overcommitted"
    for gpu in offer.gpus:
        slices = [s for a in allocations for s in a.slices if s.gpu_index == gpu.index]
        if sum(s.share_milli for s in slices) > 1000:
            return f"GPU {gpu.index} is overcommitted"
        if sum(s.memory_bytes for s in slices) > gpu.memory_bytes:
            return f"memory of GPU {gpu.index} is overcommitted"
    return ""


def _gang_problem(row: TaskSnapshot, wanted: int, sites: set[str]) -> str | None:
    """A gang with leases is on `wanted` nodes of one site; another task is on one."""
    if not row.holding:
        held = any(member.holding for member in row.members)
        return f"members of a gang hold leases, and the gang does not: {row}" if held else None
    if wanted == 1:
        is_alone = not row.members and row.node is not None
        return None if is_alone else f"a task of one node is on several, or none: {row}"
    ranks = [member.rank for member in row.members]
    if len(row.places) != wanted or ranks != list(range(wanted)) or len(sites) != 1:
        return f"a partial gang; {wanted} nodes of one site were asked for: {row}"
    return None


def _mark_problem(old: TaskSnapshot, row: TaskSnapshot) -> str | None:
    task, epoch, node = row.mark.split(".")[:3]
    if int(task) != row.task:
        return f"a result of task {task} was accepted for another: {row}"
    if not (old.holding and int(epoch) == old.epoch and node in old.places):
        return f"a result of epoch {epoch} on {node} was accepted while the task was {old}"
    return None
