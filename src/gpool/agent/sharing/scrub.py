"""Scrub of a GPU's memory between users: runs the scrubber in a sandbox and checks its report."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpool.agent.runtime.protocol import CommandJob, GpuShare, Runtime, SandboxFailed, SandboxLimits
from gpool.core.model import GIB

SCRIPT = Path(__file__).with_name("scrubber.py")
WITHIN_S = 30.0
LEAST_PART = 0.95
"""Least part of the free memory to overwrite; the driver keeps some once a program starts."""
LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=8 * GIB)
MOST_SAID = 64 * 1024


@dataclass(frozen=True, slots=True)
class Scrubbed:
    free: int = 0
    scrubbed: int = 0
    wrong: int = 0
    refused: str = ""


def fault(told: Scrubbed) -> str:
    """Reason; empty if clean."""
    if told.refused:
        return told.refused
    if told.wrong:
        return f"{told.wrong} samples of it did not hold what was written"
    if told.scrubbed < LEAST_PART * told.free or not told.scrubbed:
        return f"only {told.scrubbed} of {told.free} free bytes could be overwritten"
    return ""


def read(said: bytes) -> Scrubbed:
    lines = said.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=Scrubbed)
    except msgspec.DecodeError:
        return Scrubbed(refused=said.decode("utf-8", "replace").strip()[-400:] or "it said nothing")


async def scrub(runtime: Runtime, seat: GpuShare) -> Scrubbed:
    """Overwrite all free memory of the GPU. Never raises for faults of the card."""
    argv = ("python3", "-I", "-c", SCRIPT.read_text())
    said = b""
    try:
        async with asyncio.timeout(WITHIN_S):
            sandbox = await runtime.start_command(
                CommandJob(argv, (), (), (), LIMITS, gpu_share=seat)
            )
            try:
                async for _, data in sandbox.output():
                    said = (said + data)[-MOST_SAID:]
                await sandbox.ended()
            finally:
                await asyncio.shield(sandbox.remove())
    except TimeoutError:
        return Scrubbed(refused=f"it took longer than {WITHIN_S:g} s")
    except SandboxFailed as error:
        return Scrubbed(refused=str(error))
    return read(said)
