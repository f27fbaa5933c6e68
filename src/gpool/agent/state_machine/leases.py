"""The leases an agent has, and what it says of them: output, ends, what was handed back. Starts and ends nothing."""

from __future__ import annotations

from collections.abc import Iterable

from gpool.agent.state_machine import ends
from gpool.agent.state_machine.lease_queues import Fate, Held, Past, Place
from gpool.agent.state_machine.log_buffer import LogBuffer
from gpool.agent.state_machine.outbox import Outbox
from gpool.core.model import OutputFile, Phase
from gpool.wire.frames import Checkpointed, Finished, HandedBack, Released

OUTPUT_BYTES = 100  # what an output costs a report beside its name


class Leases:
    """Every lease of one agent; each end is reported once, into the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.held: dict[int, Held] = {}
        self.outlived: dict[int, Held] = {}  # forgotten ones whose sandbox is still being ended
        self.past = Past()
        self._whys: dict[int, str] = {}  # what is said of those with a fate, by task

    def condemn(self, held: Held, fate: Fate, why: str) -> None:
        """Its run is to be ended; when it has, this is why."""
        held.fate = fate
        self._whys[held.task] = why

    def announce(self, now: int, held: Held) -> None:
        """It runs long enough to be worth saying."""
        self._outbox.add_started(now, held.task, held.epoch)

    def reached(self, now: int, held: Held, phase: Phase) -> None:
        """It is in this phase for long enough to be worth saying."""
        self._outbox.add_reached(now, held.task, held.epoch, phase)

    def checkpointed(self, now: int, held: Held, files: tuple[OutputFile, ...]) -> None:
        self._outbox.add(now, Checkpointed(held.task, held.epoch, files), _names_bytes(files))

    def forget(self, held: Held) -> None:
        held.fate = Fate.FORGOTTEN
        if held.place is not Place.WAITING:
            self.outlived[held.task] = held
        self.leave(held)

    def leave(self, held: Held) -> None:
        del self.held[held.task]
        self.past.add(held.task, held.epoch)
        if self._whys:
            self._whys.pop(held.task, None)

    def hand_back(self, now: int, leases: Iterable[Held]) -> None:
        for held in leases:
            self.forget(held)
            self._outbox.add(now, HandedBack(held.task, held.epoch))

    def finish(self, now: int, held: Held, finished: Finished) -> None:
        """The attempt is over: its log, then its end."""
        if held.log is not None:
            self.flush_log(now, held)
        self.leave(held)
        data = len(finished.value) + len(finished.error_text.encode("utf-8", "replace"))
        if finished.outputs:
            data += _names_bytes(finished.outputs)
        self._outbox.add(now, finished, data)

    def conclude(self, now: int, held: Held) -> None:
        """The run of a lease with a fate is over."""
        if self.outlived.get(held.task) is held:
            del self.outlived[held.task]
        if held.fate is Fate.STOPPED:
            self.leave(held)
            self._outbox.add(now, Released(held.task, held.epoch))
        elif held.fate is Fate.TIMED_OUT:
            self.finish(now, held, ends.timed_out(held, self._whys.get(held.task, "")))
        elif held.fate in (Fate.SHUTDOWN, Fate.PREEMPTED):
            self.finish(now, held, ends.preempted(held, self._whys.get(held.task, "")))
        elif held.fate is Fate.LET_GO:
            held.log = None
            self.finish(now, held, ends.lost(held))

    def note(self, now: int, held: Held, stream: int, data: bytes) -> None:
        if held.log is None:
            held.log = LogBuffer(held.task, held.epoch)
        held.log.append(now, stream, data)

    def flush_log(self, now: int, held: Held) -> None:
        if held.log is not None:
            for chunk in held.log.take():
                self._outbox.add(now, chunk, len(chunk.data))


def _names_bytes(files: tuple[OutputFile, ...]) -> int:
    return sum(len(file.path.encode()) + OUTPUT_BYTES for file in files)
