"""The agent's body: it tells the session what happens and obeys what it says. The only place that reads the clock.

One loop takes every event there is before it sleeps again, so batches form by themselves under load.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import assert_never

import structlog

from gpool.agent.running.command_executor import CommandKeeper
from gpool.agent.running.runner_executor import RunnerKeeper
from gpool.agent.running.sandboxes import Equipment
from gpool.agent.state_machine.instructions import (
    CommandEnded,
    EndCommand,
    EndRunner,
    Event,
    Exit,
    Instruction,
    OfferDetected,
    RunnerEnded,
    Send,
    SendCalls,
    ShutdownAsked,
    StartCommand,
    StartRunner,
    Ticked,
)
from gpool.agent.state_machine.session import Session
from gpool.wire.frames import AgentFrame

LONGEST_SLEEP_S = 1.0
"""The loop's timers stand still while the machine sleeps, the boot clock does not: look at it this often."""

log = structlog.get_logger(__name__)


def boot_clock() -> int:
    """Microseconds since boot, counting while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def wall_clock() -> datetime:
    """The owner's time of day, with the machine's time zone; for the owner's rules only."""
    return datetime.fromtimestamp(time.clock_gettime(time.CLOCK_REALTIME)).astimezone()


class Daemon:
    """`send` puts a frame on the channel; `equip` builds the sandboxes' equipment around our `feed`."""

    def __init__(
        self,
        session: Session,
        send: Callable[[AgentFrame], None],
        equip: Callable[[Callable[[Event], None]], Equipment],
        clock: Callable[[], int] = boot_clock,
    ) -> None:
        self._session = session
        self._send = send
        self._clock = clock
        self._equipment = equip(self.feed)
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._commands: dict[tuple[int, int], CommandKeeper] = {}
        self._runners: dict[int, RunnerKeeper] = {}
        self._leaving = False
        self._over = False

    def feed(self, event: Event) -> None:
        """Something happened; from the loop's own thread only."""
        self._events.append(event)
        self._wake.set()

    def ask_to_stop(self) -> None:
        """The first time: end in good order. The second time: now."""
        if self._leaving:
            log.warning("leaving_at_once")
            self._events.clear()
            self._obey(Exit())
        self._leaving = True
        self.feed(ShutdownAsked())

    async def run(self) -> None:
        """Until the session says `Exit`; whatever still runs then is killed."""
        try:
            while not self._over:
                await self._wait()
                self._take_all()
        finally:
            await self._end_all()

    async def _wait(self) -> None:
        if self._events:
            await asyncio.sleep(0)
            return
        self._wake.clear()
        wakes_at = self._session.wakes_at
        delay = LONGEST_SLEEP_S
        if wakes_at is not None:
            delay = min(delay, max(0.0, (wakes_at - self._clock()) / 1_000_000))
        timer = asyncio.get_running_loop().call_later(delay, self._wake.set)
        await self._wake.wait()
        timer.cancel()

    def _take_all(self) -> None:
        now = self._clock()
        events, self._events = self._events, deque()
        for event in events:
            self._note(event)
            for instruction in self._session.handle(now, event):
                self._obey(instruction)
        wakes_at = self._session.wakes_at
        if wakes_at is not None and wakes_at <= now:
            for instruction in self._session.handle(now, Ticked()):
                self._obey(instruction)

    def _note(self, event: Event) -> None:
        warm = self._equipment.warm
        if type(event) is CommandEnded:
            self._commands.pop((event.task, event.epoch), None)
            if warm is not None:
                warm.lease_ended((event.task, event.epoch))
        elif type(event) is RunnerEnded:
            self._runners.pop(event.runner, None)
        elif type(event) is OfferDetected and warm is not None:
            warm.offered(event.offer)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case Send():
                self._send(instruction.frame)
            case SendCalls():
                if (runner := self._runners.get(instruction.runner)) is not None:
                    runner.send(instruction.calls)
            case StartCommand():
                key = (instruction.task, instruction.epoch)
                self._commands[key] = CommandKeeper(self._equipment, instruction)
                if (warm := self._equipment.warm) is not None:
                    warm.lease_began(key, instruction.allocation.memory_bytes)
            case EndCommand():
                command = self._commands.get((instruction.task, instruction.epoch))
                if command is not None:
                    command.end(instruction.reason, instruction.grace_us)
            case StartRunner():
                self._runners[instruction.runner] = RunnerKeeper(self._equipment, instruction)
            case EndRunner():
                if (runner := self._runners.get(instruction.runner)) is not None:
                    runner.end()
            case Exit():
                self._over = True
                self._wake.set()
            case _:
                assert_never(instruction)

    async def _end_all(self) -> None:
        keepers: list[CommandKeeper | RunnerKeeper] = [
            *self._commands.values(),
            *self._runners.values(),
        ]
        tasks = [keeper.task for keeper in keepers if not keeper.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._equipment.cleaning:
            await asyncio.wait(list(self._equipment.cleaning))
