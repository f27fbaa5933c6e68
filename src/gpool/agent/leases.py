"""The leases an agent has, and what it says of them: output, ends, what was handed back. Starts and ends nothing."""

from __future__ import annotations

from collections.abc import Iterable

from gpool.agent import ends
from gpool.agent.lines import Fate, Held, Past, Place
from gpool.agent.logs import LogBuffer
from gpool.agent.outbox import Outbox
from gpool.wire.frames import Finished, HandedBack, Released


class Leases:
    """Every lease of one agent; each end is reported once, into the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.held: dict[int, Held] = {}
        self.outlived: dict[int, Held] = {}  # forgotten ones whose sandbox is still being ended
        self.past = Past()

    def announce(self, now: int, held: Held) -> None:
        """It runs long enough to be worth saying."""
        self._outbox.add_started(now, held.task, held.epoch)

    def forget(self, held: Held) -> None:
        held.fate = Fate.FORGOTTEN
        if held.place is not Place.WAITING:
            self.outlived[held.task] = held
        self.leave(held)

    def leave(self, held: Held) -> None:
        del self.held[held.task]
        self.past.add(held.task, held.epoch)

    def hand_back(self, now: int, leases: Iterable[Held]) -> None:
        for held in leases:
            self.forget(held)
            self._outbox.add(now, HandedBack(held.task, held.epoch))

    def finish(self, now: int, held: Held, finished: Finished) -> None:
        """The attempt is over: its log, then its end."""
        if held.log is not None:
            self.flush_log(now, held)
        self.leave(held)
        data = len(finished.value) + len(finished.error_text) + 200 * len(finished.outputs)
        self._outbox.add(now, finished, data)

    def conclude(self, now: int, held: Held) -> None:
        """The run of a lease with a fate is over."""
        if self.outlived.get(held.task) is held:
            del self.outlived[held.task]
        if held.fate is Fate.STOPPED:
            self.leave(held)
            self._outbox.add(now, Released(held.task, held.epoch))
        elif held.fate is Fate.TIMED_OUT:
            self.finish(now, held, ends.timed_out(held))
        elif held.fate is Fate.SHUTDOWN:
            self.finish(now, held, ends.preempted(held))
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
