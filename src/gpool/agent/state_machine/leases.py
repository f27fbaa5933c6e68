"""The leases an agent holds, and the reports about them. Starts and ends no sandbox."""

from __future__ import annotations

from collections.abc import Iterable

from gpool.agent.state_machine import end_reports
from gpool.agent.state_machine.lease_queues import AgentLease, EndedLeases
from gpool.agent.state_machine.outbox import LogBuffer, Outbox
from gpool.agent.state_machine.transitions import LeaseMove, LeaseState
from gpool.core.model import OutputFile, Phase
from gpool.wire.frames import Checkpointed, Finished, HandedBack, Released

FINISHED = LeaseMove.FINISHED  # for each call: a member of an enum is slow to look up
OUTPUT_BYTES = 100  # of an output in a report, without its name


class Leases:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.held: dict[int, AgentLease] = {}  # by task
        self.outlived: dict[int, AgentLease] = {}  # dropped ones whose sandbox is still being ended
        self.ended = EndedLeases()

    def ids(self) -> list[tuple[int, int]]:
        return [(lease.task, lease.epoch) for lease in self.held.values()]

    def get(self, task: int, epoch: int) -> AgentLease | None:
        lease = self.held.get(task)
        return lease if lease is not None and lease.epoch == epoch else None

    # ---- progress

    def announce(self, now: int, lease: AgentLease) -> None:
        self._outbox.add_started(now, lease.task, lease.epoch)

    def reached(self, now: int, lease: AgentLease, phase: Phase) -> None:
        self._outbox.add_reached(now, lease.task, lease.epoch, phase)

    def checkpointed(self, now: int, lease: AgentLease, files: tuple[OutputFile, ...]) -> None:
        self._outbox.add(now, Checkpointed(lease.task, lease.epoch, files), _names_bytes(files))

    def print(self, now: int, lease: AgentLease, stream: int, data: bytes) -> None:
        if lease.log is None:
            lease.log = LogBuffer(lease.task, lease.epoch)
        lease.log.append(now, stream, data)

    def flush_log(self, now: int, lease: AgentLease) -> None:
        if lease.log is not None:
            for chunk in lease.log.take():
                self._outbox.add(now, chunk, len(chunk.data))

    # ---- ends

    def finish(self, now: int, lease: AgentLease, finished: Finished) -> None:
        if lease.log is not None:
            self.flush_log(now, lease)
        lease.move(now, FINISHED, finished.reason)
        self._remove(lease)
        data = len(finished.value) + len(finished.error_text.encode("utf-8", "replace"))
        if finished.outputs:
            data += _names_bytes(finished.outputs)
        self._outbox.add(now, finished, data)

    def release(self, now: int, lease: AgentLease) -> None:
        lease.move(now, LeaseMove.RELEASED)
        self._remove(lease)
        self._outbox.add(now, Released(lease.task, lease.epoch))

    def return_unstarted(self, now: int, leases: Iterable[AgentLease], why: str = "") -> None:
        for lease in leases:
            lease.move(now, LeaseMove.RETURNED, why)
            self._remove(lease)
            self._outbox.add(now, HandedBack(lease.task, lease.epoch))

    def drop(self, now: int, lease: AgentLease) -> None:
        """A lease in a sandbox stays in `outlived` until that is gone."""
        lease.move(now, LeaseMove.DROPPED)
        if lease.state is LeaseState.DROPPED:
            self.outlived[lease.task] = lease
        self._remove(lease)

    def conclude(self, now: int, lease: AgentLease) -> None:
        match lease.state:
            case LeaseState.STOPPING:
                self.release(now, lease)
            case LeaseState.TIMING_OUT:
                self.finish(now, lease, end_reports.timed_out(lease, lease.reason))
            case LeaseState.SHUTTING_DOWN | LeaseState.PREEMPTING:
                self.finish(now, lease, end_reports.preempted(lease, lease.reason))
            case LeaseState.EXPIRED:
                lease.log = None
                self.finish(now, lease, end_reports.lost(lease))
            case _:
                if self.outlived.get(lease.task) is lease:
                    del self.outlived[lease.task]
                lease.move(now, LeaseMove.CLEARED)

    def _remove(self, lease: AgentLease) -> None:
        del self.held[lease.task]
        self.ended.add(lease.task, lease.epoch)


def _names_bytes(files: tuple[OutputFile, ...]) -> int:
    return sum(len(file.path.encode()) + OUTPUT_BYTES for file in files)
