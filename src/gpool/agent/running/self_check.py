"""The self-check after a failed start: whether a runtime can start anything now, without anything of the task.

It starts the simplest sandbox, at most every `AGAIN_AFTER_US`, or asks the engine. Its result is evidence against this
node, so doubt (a time-out) counts as unclear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from gpool.agent.running.sandboxes import run_to_completion, start_sandbox
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
"""How long a result is valid."""
WITHIN_S = 30.0
"""A busy machine may be slow without being broken."""
SIMPLEST = CommandJob(
    ("/bin/true",), (), (), (), SandboxLimits(1000, 256 * MIB, disk_bytes=16 * MIB)
)


class RuntimeSelfCheck:
    def __init__(self, clock: Callable[[], int], within_s: float = WITHIN_S) -> None:
        self._clock = clock
        self._within_s = within_s
        self._found: dict[
            str, tuple[int, str]
        ] = {}  # by runtime: when, and the error ("" for none)
        self._locks: dict[str, asyncio.Lock] = {}
        self.checks = 0  # so far

    async def fault(self, runtime: Runtime, /) -> Fault:
        async with self._locks.setdefault(runtime.name, asyncio.Lock()):
            known = self._found.get(runtime.name)
            if known is None or self._clock() >= known[0] + AGAIN_AFTER_US:
                why = await self._check(runtime)  # may take longer than a result is valid
                known = (self._clock(), why)
                self._found[runtime.name] = known
        return Fault.NODE if known[1] else Fault.UNCLEAR

    async def _check(self, runtime: Runtime) -> str:
        self.checks += 1
        try:
            async with asyncio.timeout(self._within_s):
                why = await _error_of(runtime)
        except TimeoutError:
            log.warning("self_check_timed_out", runtime=runtime.name)
            return ""
        if why:
            log.error("runtime_cannot_start", runtime=runtime.name, why=why)
        return why


async def _error_of(runtime: Runtime) -> str:
    try:
        known = await runtime.self_check()
        if known is not None or RuntimeAbility.IMAGES in runtime.abilities:
            return known or ""
        return await _cannot_start(runtime)
    except (SandboxFailed, OSError) as error:
        if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
            raise TimeoutError from error  # the runtime's own time-out
        return str(error) or type(error).__name__


async def _cannot_start(runtime: Runtime) -> str:
    sandbox = await start_sandbox(runtime, runtime.start_command(SIMPLEST))
    try:
        async for _ in sandbox.output():
            pass
        ended = await sandbox.ended()
    finally:
        await run_to_completion(sandbox.kill)
        await run_to_completion(sandbox.remove)
    return (ended.detail or "it ended") if ended.reason is EndReason.SANDBOX_FAILED else ""
