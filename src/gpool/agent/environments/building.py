"""Builds of virtual environments with uv, in a sandbox that reaches the node's package indexes only.

A build sees nothing of another build or of the agent, so it can spoil only itself. If an index address contains a
password, no package code runs: it could leave the password in the environment for a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpool.agent.environments.environments import BuildFailed, Told
from gpool.agent.environments.indexes import Indexes
from gpool.agent.environments.interpreters import Interpreter
from gpool.agent.runtime.bubblewrap.layout import HOME
from gpool.agent.runtime.protocol import (
    BadOutput,
    CommandJob,
    CommandSandbox,
    PreparedEnvironment,
    SandboxExit,
    SandboxFailed,
    SandboxLimits,
    SandboxNetwork,
    StagedInput,
)
from gpool.core.model import GIB, EndReason, Recipe

KIT = f"{HOME}/kit"
LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=4 * GIB, processes=512, disk_bytes=40 * GIB)
LONGEST_S = 1800
TAIL_LINES, TAIL_LETTERS = 30, 4000
LONGEST_LINE = 2000

OpenLane = Callable[[Indexes], AbstractAsyncContextManager[SandboxNetwork | None]]
"""Opens a network to these indexes only; None if none of them is on the network."""

SCRIPT = f"""
set -eu
export UV_CACHE_DIR="$PWD/.cache"
{KIT}/uv venv --quiet --no-project --relocatable --python "$BASE" env
{KIT}/uv pip install --python env/bin/python --requirements requirements.txt
cd env/lib/python*/site-packages
env -i LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:-}}" "$BASE" -I -S -m compileall -q -j 0 \
    --invalidation-mode unchecked-hash . > /dev/null 2>&1 || true
"""
"""Contains nothing of an environment spec. The bare interpreter compiles the installed files and runs none of them."""


_AWAY = re.compile(
    r"^\s*(?:cause:|Caused by:)?\s*(?:dns error|client error \(Connect\)|operation timed out|"
    r"connection (?:reset|closed)|HTTP status server error)",
    re.MULTILINE | re.IGNORECASE,
)
"""uv's messages for an unreachable server."""


@runtime_checkable
class Building(CommandSandbox, Protocol):
    async def take(self, directory: str, to: Path) -> None: ...


class Sandboxes(Protocol):
    async def start_command(self, job: CommandJob) -> CommandSandbox: ...


def find_uv() -> Path | None:
    beside = Path(sysconfig.get_path("scripts")) / "uv"
    for found in (
        str(beside),
        shutil.which("uv", path=str(Path(sys.executable).parent)),
        shutil.which("uv"),
    ):
        if found and os.access(found, os.X_OK) and _is_program(Path(found)):
            return Path(found).resolve()
    return None


def _is_program(file: Path) -> bool:
    """A shim script would not work inside a sandbox."""
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"\x7fELF"
    except OSError:
        return False


@contextlib.asynccontextmanager
async def no_lane(_indexes: Indexes) -> AsyncIterator[SandboxNetwork | None]:
    yield None


class UvBuilder:
    """`folder` lies on the same disk as the runtime's work directories."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        folder: Path,
        uv: Path,
        indexes: Indexes,
        open_lane: OpenLane = no_lane,
        *,
        limits: SandboxLimits = LIMITS,
    ) -> None:
        self._sandboxes = sandboxes
        self._empty = folder.resolve() / "empty"
        self._empty.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._uv = uv
        self._indexes = indexes
        self._open_lane = open_lane
        self._limits = limits

    async def build(self, recipe: Recipe, interpreter: Interpreter, into: Path, told: Told) -> None:
        output = _Listened(told, self._indexes.secrets)
        try:
            async with asyncio.timeout(LONGEST_S):
                await self._run(recipe, interpreter, into, output)
        except TimeoutError as exc:
            raise BuildFailed(f"the build exceeded {LONGEST_S} s\n{output.tail}") from exc

    async def _run(
        self, recipe: Recipe, interpreter: Interpreter, into: Path, output: _Listened
    ) -> None:
        # beside the build: the next agent removes it after a kill
        with tempfile.TemporaryDirectory(dir=into.parent, prefix="recipe-") as folder:
            wanted = Path(folder) / "requirements.txt"
            wanted.write_text("".join(f"{one}\n" for one in recipe.packages))
            async with self._open_lane(self._indexes) as lane:
                job = self._job(interpreter, wanted, lane)
                sandbox = await _started(self._sandboxes, job)
                try:
                    async for _stream, data in sandbox.output():
                        output.hear(data)
                    output.hear(b"\n")
                    _judge(await sandbox.ended(), output)
                    if not isinstance(sandbox, Building):
                        raise SandboxFailed("nothing can be taken out of this runtime's sandboxes")
                    await sandbox.take("env", into)
                except BadOutput as exc:
                    raise BuildFailed(f"what was built cannot be kept: {exc}") from exc
                finally:
                    await asyncio.shield(_ended(sandbox))

    def _job(
        self, interpreter: Interpreter, wanted: Path, lane: SandboxNetwork | None
    ) -> CommandJob:
        indexes = self._indexes
        variables = [
            ("BASE", interpreter.program),
            ("UV_NO_CONFIG", "1"),
            ("UV_NO_PROGRESS", "1"),
            ("UV_PYTHON_DOWNLOADS", "never"),
            ("UV_LINK_MODE", "hardlink"),
            ("NO_COLOR", "1"),
            *indexes.variables(),
        ]
        binds: dict[str, Path] = {f"{KIT}/uv": self._uv, **interpreter.binds}
        binds |= {str(path): path for path in indexes.folders()}
        if indexes.certificate is not None:
            binds[f"{KIT}/certificates.pem"] = indexes.certificate.resolve()
            variables.append(("SSL_CERT_FILE", f"{KIT}/certificates.pem"))
        if indexes.secrets:
            variables.append(("UV_NO_BUILD", "1"))
        return CommandJob(
            ("/bin/sh", "-c", SCRIPT),
            tuple(variables),
            (StagedInput("requirements.txt", wanted, executable=False),),
            (),
            self._limits,
            environment=PreparedEnvironment("build", self._empty, interpreter.program, binds),
            network=lane,
        )


async def _started(sandboxes: Sandboxes, job: CommandJob) -> CommandSandbox:
    starting = asyncio.ensure_future(sandboxes.start_command(job))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(SandboxFailed):
            await _ended(await starting)
        raise


async def _ended(sandbox: CommandSandbox) -> None:
    await sandbox.kill()
    await sandbox.remove()


def _judge(ended: SandboxExit, output: _Listened) -> None:
    if ended.reason is EndReason.SANDBOX_FAILED:
        raise SandboxFailed(f"no sandbox for a build: {ended.detail}")
    if ended.reason is not EndReason.EXITED:
        raise BuildFailed(f"the build was stopped: {ended.detail}\n{output.tail}")
    if ended.exit_code and _AWAY.search(output.tail):
        raise SandboxFailed(f"this node cannot reach its package indexes:\n{output.tail}")
    if ended.exit_code:
        raise BuildFailed(f"the environment cannot be built:\n{output.tail}")


class _Listened:
    """Output lines without the passwords of the node's indexes."""

    def __init__(self, told: Told, secrets: Sequence[str]) -> None:
        self._told, self._secrets = told, sorted(secrets, key=len, reverse=True)
        self._rest = b""
        self._last: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> str:
        return "\n".join(self._last)[-TAIL_LETTERS:]

    def hear(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole.append(self._rest)
            self._rest = b""
        for raw in whole:
            text = raw[:LONGEST_LINE].decode("utf-8", "replace")
            line = "".join(one if one.isprintable() else " " for one in text).rstrip()
            for secret in self._secrets:
                line = line.replace(secret, "****")
            if line:
                self._last.append(line)
                self._told(line)
