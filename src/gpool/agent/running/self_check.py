"""Whether this node can start anything at all of a kind just now. Asked after something could not be started; needs nothing of the task.

It starts the simplest sandbox there is, by the same door as tasks, and not oftener than every so often. Where only images run,
which are the tasks' own, the runtime is asked whether its engine answers. What it finds is this node's word against itself: so
whatever is not plain (it took too long, it cannot be asked) is unclear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from gpool.agent.running.sandboxes import started, to_its_end
from gpool.agent.runtime.protocol import (
    CommandJob,
    Runtime,
    RuntimeAbility,
    SandboxFailed,
    SandboxLimits,
)
from gpool.core.model import MIB, EndReason, Fault

log = structlog.get_logger(__name__)

AGAIN_AFTER_US = 10_000_000
"""What was found holds for so long."""
WITHIN_S = 30.0
"""A machine that is busy may take its time, and is not broken for that."""
SIMPLEST = CommandJob(
    ("/bin/true",), (), (), (), SandboxLimits(1000, 256 * MIB, disk_bytes=16 * MIB)
)


class Checkup:
    def __init__(self, clock: Callable[[], int], within_s: float = WITHIN_S) -> None:
        self._clock = clock
        self._within_s = within_s
        self._found: dict[str, tuple[int, str]] = {}  # by runtime: when, and what is wrong
        self._looking: dict[str, asyncio.Lock] = {}
        self.looks = 0  # so far

    async def fault(self, runtime: Runtime, /) -> Fault:
        """Of whoever could not start something by this runtime: the node's, or not to be told."""
        async with self._looking.setdefault(runtime.name, asyncio.Lock()):
            known = self._found.get(runtime.name)
            if known is None or self._clock() >= known[0] + AGAIN_AFTER_US:
                why = await self._look(runtime)  # which may take longer than it holds
                known = (self._clock(), why)
                self._found[runtime.name] = known
        return Fault.NODE if known[1] else Fault.UNCLEAR

    async def _look(self, runtime: Runtime) -> str:
        self.looks += 1
        try:
            async with asyncio.timeout(self._within_s):
                why = await _wrong_with(runtime)
        except TimeoutError:
            log.warning("checkup_took_too_long", runtime=runtime.name)
            return ""
        if why:
            log.error("cannot_start_anything", runtime=runtime.name, why=why)
        return why


async def _wrong_with(runtime: Runtime) -> str:
    """Empty: it is well."""
    try:
        known = await runtime.self_check()
        if known is not None or RuntimeAbility.IMAGES in runtime.abilities:
            return known or ""
        return await _cannot_start(runtime)
    except (SandboxFailed, OSError) as error:
        if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
            raise TimeoutError from error  # by a runtime's own patience
        return str(error) or type(error).__name__


async def _cannot_start(runtime: Runtime) -> str:
    sandbox = await started(runtime, runtime.start_command(SIMPLEST))
    try:
        async for _ in sandbox.output():
            pass
        ended = await sandbox.ended()
    finally:
        await to_its_end(sandbox.kill)
        await to_its_end(sandbox.remove)
    return (ended.detail or "it ended") if ended.reason is EndReason.SANDBOX_FAILED else ""
