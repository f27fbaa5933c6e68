"""The agent's event loop: feeds events to the state machine and executes its instructions. Reads the clocks.

An event that comes while it sleeps is handled at once, others in their order when it wakes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import assert_never

import structlog

from gpool.agent.running.command_executor import CommandExecutor
from gpool.agent.running.runner_executor import RunnerExecutor
from gpool.agent.running.sandboxes import ExecutorContext
from gpool.agent.state_machine.agent_state import AgentState
from gpool.agent.state_machine.instructions import (
    CommandEnded,
    EndCommand,
    EndRunner,
    Event,
    ExitDaemon,
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
from gpool.wire.frames import AgentFrame

LONGEST_SLEEP_S = 1.0
"""The loop's timers stop while the machine is suspended, the boot clock does not: compare it this often."""

log = structlog.get_logger(__name__)


def boot_clock() -> int:
    """Return microseconds since boot, time of suspension included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def wall_clock() -> datetime:
    """Local time; for the owner's policy only."""
    return datetime.fromtimestamp(time.clock_gettime(time.CLOCK_REALTIME)).astimezone()


class Daemon:
    def __init__(
        self,
        state: AgentState,
        send: Callable[[AgentFrame], None],
        context: Callable[[Callable[[Event], None]], ExecutorContext],
        clock: Callable[[], int] = boot_clock,
    ) -> None:
        self._state = state
        self._send = send
        self._clock = clock
        self._context = context(self.feed)
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._commands: dict[tuple[int, int], CommandExecutor] = {}
        self._runners: dict[int, RunnerExecutor] = {}
        self._stopping = False
        self._over = False
        self._sleeps = False
        self._failure: Exception | None = None  # of an event handled in `feed`; raised by `run`

    def feed(self, event: Event) -> None:
        self._events.append(event)
        if self._sleeps:
            self._sleeps = False  # instructions may feed further events
            try:
                self._handle_events()
            except Exception as error:  # noqa: BLE001 - must not end the component that feeds
                self._failure = error
        self._wake.set()  # the next timer may be another one now

    def request_stop(self) -> None:
        if self._stopping:
            log.warning("stopping_at_once")
            self._events.clear()
            self._carry_out(ExitDaemon())
        else:
            log.info("agent_stops", tasks_back_to_the_queue=len(self._state.holds))
        self._stopping = True
        self.feed(ShutdownAsked())

    async def run(self) -> None:
        try:
            while not self._over:
                await self._wait()
                if self._failure is not None:
                    raise self._failure
                self._handle_events()
        finally:
            await self._end_all()

    async def _wait(self) -> None:
        if self._events:
            await asyncio.sleep(0)
            return
        self._wake.clear()
        wakes_at = self._state.wakes_at
        delay = LONGEST_SLEEP_S
        if wakes_at is not None:
            delay = min(delay, max(0.0, (wakes_at - self._clock()) / 1_000_000))
        timer = asyncio.get_running_loop().call_later(delay, self._wake.set)
        self._sleeps = True
        try:
            await self._wake.wait()
        finally:
            self._sleeps = False
            timer.cancel()

    def _handle_events(self) -> None:
        now = self._clock()
        events, self._events = self._events, deque()
        for event in events:
            self._update_executors(event)
            for instruction in self._state.handle(now, event):
                self._carry_out(instruction)
        wakes_at = self._state.wakes_at
        if wakes_at is not None and wakes_at <= now:
            for instruction in self._state.handle(now, Ticked()):
                self._carry_out(instruction)

    def _update_executors(self, event: Event) -> None:
        warm = self._context.warm
        if type(event) is CommandEnded:
            self._commands.pop((event.task, event.epoch), None)
            if warm is not None:
                warm.lease_ended((event.task, event.epoch))
        elif type(event) is RunnerEnded:
            self._runners.pop(event.runner, None)
        elif type(event) is OfferDetected and warm is not None:
            warm.offered(event.offer)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send():
                self._send(instruction.frame)
            case SendCalls():
                if (runner := self._runners.get(instruction.runner)) is not None:
                    runner.send(instruction.calls)
            case StartCommand():
                key = (instruction.task, instruction.epoch)
                self._commands[key] = CommandExecutor(self._context, instruction)
                if (warm := self._context.warm) is not None:
                    warm.lease_began(key, instruction.allocation.memory_bytes)
            case EndCommand():
                command = self._commands.get((instruction.task, instruction.epoch))
                if command is not None:
                    command.end(instruction.reason, instruction.grace_us)
            case StartRunner():
                self._runners[instruction.runner] = RunnerExecutor(self._context, instruction)
            case EndRunner():
                if (runner := self._runners.get(instruction.runner)) is not None:
                    runner.end()
            case ExitDaemon():
                self._over = True
                self._wake.set()
            case _:
                assert_never(instruction)

    async def _end_all(self) -> None:
        executors: list[CommandExecutor | RunnerExecutor] = [
            *self._commands.values(),
            *self._runners.values(),
        ]
        tasks = [executor.task for executor in executors if not executor.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._context.cleaning:
            await asyncio.wait(list(self._context.cleaning))
