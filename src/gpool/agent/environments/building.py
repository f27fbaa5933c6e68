"""Builds of virtual environments with uv: a download that runs no package code, then a build without a network.

A build has the limits of the lease that asks, and sees nothing of another build or of the agent. If an index address
contains a password, no package code runs: it could leave the password in the environment for a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpool.agent.environments import fetch_sources
from gpool.agent.environments.environments import BuildFailed, Told
from gpool.agent.environments.indexes import Indexes, configuration_files, read_indexes
from gpool.agent.environments.interpreters import Interpreter, measured
from gpool.agent.environments.interpreters import remove as remove_tree
from gpool.agent.runtime.bubblewrap.layout import HOME
from gpool.agent.runtime.protocol import (
    WORK_AT,
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
from gpool.core.model import EndReason, Recipe

KIT = f"{HOME}/kit"
FETCH = Path(__file__).with_name("fetch_sources.py")
FETCHED = "fetched"  # directory that passes from the download to the build
LONGEST_S = 1800
LEAST_DISK_BYTES = 1 << 20
TAIL_LINES, TAIL_LETTERS = 30, 4000
LONGEST_LINE = 2000

OpenLane = Callable[[Indexes], AbstractAsyncContextManager[SandboxNetwork | None]]
"""Opens a network to these indexes only; None if none of them is on the network."""

_HEAD = f"""
set -eu
export UV_CACHE_DIR="$PWD/{FETCHED}/cache"
{KIT}/uv venv --quiet --no-project --relocatable --python "$BASE" env
"""
_INSTALL = f"{KIT}/uv pip install $OPTIONS --python env/bin/python --requirements requirements.txt"
_TAIL = """
cd env/lib/python*/site-packages
env -i LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}" "$BASE" -I -S -m compileall -q -j 0 \
    --invalidation-mode unchecked-hash . > /dev/null 2>&1 || true
"""
SCRIPT = f"{_HEAD}{_INSTALL}{_TAIL}"
"""Build from folders, without a network. Contains nothing of an environment spec. The bare interpreter compiles the
installed files and runs none of them."""
DOWNLOAD = f"""{_HEAD}
if {_INSTALL} --no-build; then {_TAIL} exit 0; fi
exec "$BASE" -I -S {KIT}/fetch.py requirements.txt "$SOURCES"
"""
"""Install wheels, or else fetch wheels and source archives; no package code runs. `--no-build` is a word of the command
line, so that no variable or file can undo it."""
OFFLINE = f"""
mkdir {FETCHED}
cp -R {KIT}/{FETCHED}/. {FETCHED}
chmod -R u+w {FETCHED}
{_HEAD}{_INSTALL} --offline{_TAIL}"""
"""Build source archives from the fetched files, without a network."""
OUT_OF_MEMORY = "the build ran out of its lease's memory; ask for more with --memory"
WHEELS_ONLY = (
    "this node's index needs a password, so it installs wheels only and builds no source package"
)


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


@dataclass(frozen=True, slots=True)
class EnvironmentSupport:
    """Indexes that builds can use, or the reason why there are none."""

    indexes: Indexes | None
    why: str = ""
    fix: str = ""


def environment_support(environ: Mapping[str, str], *, network: str) -> EnvironmentSupport:
    """Ask whether this node can build environments. `network`: why builds have no network, "" if they have one.

    The agent, its offer and `gpool node doctor` ask here.
    """
    if find_uv() is None:
        return EnvironmentSupport(None, "uv is not installed", "pip install uv")
    home = Path(environ.get("HOME") or "/")
    files = configuration_files(environ, home, Path(sys.prefix))
    found = read_indexes(files, environ).reachable(network=not network)
    if found is not None:
        return EnvironmentSupport(found)
    why = "no package index of pip or uv is in reach: none is a folder here"
    return EnvironmentSupport(None, f"{why}, and {network or 'none is on the network'}")


@contextlib.asynccontextmanager
async def no_lane(_indexes: Indexes) -> AsyncIterator[SandboxNetwork | None]:
    yield None


class UvBuilder:
    """`folder` lies on the same disk as the runtime's work directories.

    A build has two steps: a download with a network that runs no package code, and, only if wheels do not suffice, a build
    of the downloaded source archives without a network.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        folder: Path,
        uv: Path,
        indexes: Indexes,
        open_lane: OpenLane = no_lane,
    ) -> None:
        self._sandboxes = sandboxes
        self._empty = folder.resolve() / "empty"
        self._empty.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._uv = uv
        self._indexes = indexes
        self._open_lane = open_lane

    async def build(
        self,
        recipe: Recipe,
        interpreter: Interpreter,
        into: Path,
        told: Told,
        limits: SandboxLimits,
    ) -> None:
        output = _Listened(told, self._indexes.secrets)
        try:
            async with asyncio.timeout(LONGEST_S):
                await self._run(recipe, interpreter, into, limits, output)
        except TimeoutError as exc:
            raise BuildFailed(f"the build exceeded {LONGEST_S} s\n{output.tail}") from exc

    async def _run(
        self,
        recipe: Recipe,
        interpreter: Interpreter,
        into: Path,
        limits: SandboxLimits,
        output: _Listened,
    ) -> None:
        # beside the build: the next agent removes it after a kill
        with tempfile.TemporaryDirectory(dir=into.parent, prefix="recipe-") as folder:
            wanted = Path(folder) / "requirements.txt"
            wanted.write_text("".join(f"{one}\n" for one in recipe.packages))
            step = _Step(interpreter, wanted, limits, output)
            async with self._open_lane(self._indexes) as lane:
                if lane is None:
                    await self._do(self._job(step, SCRIPT), step, {"env": into})
                    return
                fetched = Path(folder) / FETCHED
                job = self._job(step, DOWNLOAD, lane)
                done = await self._do(job, step, {"env": into}, {FETCHED: fetched})
            if done:
                return
            try:
                used = (await asyncio.to_thread(measured, fetched)).size_bytes
                left = max(LEAST_DISK_BYTES, limits.disk_bytes - used)
                step = replace(step, limits=replace(limits, disk_bytes=left))
                await self._do(self._job(step, OFFLINE, fetched=fetched), step, {"env": into})
            finally:
                await asyncio.shield(asyncio.to_thread(remove_tree, fetched))

    async def _do(
        self,
        job: CommandJob,
        step: _Step,
        made: Mapping[str, Path],
        fetched: Mapping[str, Path] | None = None,
    ) -> bool:
        """Run one step and take `made` out of it; take `fetched` and return False if sources must be built."""
        sandbox = await _started(self._sandboxes, job)
        try:
            async for _stream, data in sandbox.output():
                step.output.hear(data)
            step.output.hear(b"\n")
            ended = await sandbox.ended()
            builds = fetched is not None and _is(ended, fetch_sources.FETCHED)
            if not builds:
                _judge(ended, step.output, downloads=fetched is not None)
            if not isinstance(sandbox, Building):
                raise SandboxFailed("nothing can be taken out of this runtime's sandboxes")
            for name, to in ((fetched or {}) if builds else made).items():
                await sandbox.take(name, to)
            return not builds
        except BadOutput as exc:
            raise BuildFailed(f"what was built cannot be kept: {exc}") from exc
        finally:
            await asyncio.shield(_ended(sandbox))

    def _job(
        self,
        step: _Step,
        script: str,
        lane: SandboxNetwork | None = None,
        fetched: Path | None = None,
    ) -> CommandJob:
        indexes, interpreter = self._indexes, step.interpreter
        links = indexes.find_links
        variables = [
            ("BASE", interpreter.program),
            ("UV_NO_CONFIG", "1"),
            ("UV_NO_PROGRESS", "1"),
            ("UV_PYTHON_DOWNLOADS", "never"),
            ("UV_LINK_MODE", "hardlink"),
            ("NO_COLOR", "1"),
            ("OPTIONS", " ".join(indexes.options)),
        ]
        binds: dict[str, Path] = {f"{KIT}/uv": self._uv, **interpreter.binds}
        binds |= {str(path): path for path in indexes.folders()}
        if lane is not None:
            variables += self._reaching()
            binds[f"{KIT}/fetch.py"] = FETCH
        if fetched is not None:
            binds[f"{KIT}/{FETCHED}"] = fetched
            links = (*links, f"{KIT}/{FETCHED}/sources")
        variables += replace(indexes, find_links=links).variables()
        if indexes.certificate is not None:
            binds[f"{KIT}/certificates.pem"] = indexes.certificate.resolve()
            variables.append(("SSL_CERT_FILE", f"{KIT}/certificates.pem"))
        if indexes.secrets:
            variables.append(("UV_NO_BUILD", "1"))
        return CommandJob(
            ("/bin/sh", "-c", script),
            tuple(variables),
            (StagedInput("requirements.txt", step.wanted, executable=False),),
            (),
            step.limits,
            environment=PreparedEnvironment("build", self._empty, interpreter.program, binds),
            network=lane,
        )

    def _reaching(self) -> list[tuple[str, str]]:
        """Variables of the download: proxies, and the addresses for the fetch of sources."""
        indexes = self._indexes
        asked = () if indexes.no_index else (indexes.default, *indexes.extra)
        sources = "" if indexes.secrets else f"{WORK_AT}/{FETCHED}/sources"
        return [
            *indexes.proxies,
            ("UV", f"{KIT}/uv"),
            ("INDEXES", " ".join(one for one in asked if one)),
            ("LINKS", " ".join(indexes.find_links)),
            ("TRUSTED", " ".join(indexes.trusted_hosts)),
            ("SOURCES", sources),
        ]


@dataclass(frozen=True, slots=True)
class _Step:
    interpreter: Interpreter
    wanted: Path  # requirements.txt
    limits: SandboxLimits
    output: _Listened


def _is(ended: SandboxExit, code: int) -> bool:
    return ended.reason is EndReason.EXITED and ended.exit_code == code


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


def _judge(ended: SandboxExit, output: _Listened, *, downloads: bool) -> None:
    """Raise for a failed step. Its text decides nothing: a package's author writes it."""
    if ended.reason is EndReason.SANDBOX_FAILED:
        raise SandboxFailed(f"no sandbox for a build: {ended.detail}")
    if ended.reason is EndReason.OUT_OF_MEMORY:
        raise BuildFailed(f"{OUT_OF_MEMORY}\n{output.tail}")
    if ended.reason is not EndReason.EXITED:
        raise BuildFailed(f"the build was stopped: {ended.detail}\n{output.tail}")
    if downloads and ended.exit_code == fetch_sources.UNREACHABLE:
        raise SandboxFailed(f"this node cannot reach its package indexes:\n{output.tail}")
    if ended.exit_code:
        hint = f"\n({WHEELS_ONLY})" if downloads and output.has_secrets else ""
        raise BuildFailed(f"the environment cannot be built:\n{output.tail}{hint}")


class _Listened:
    """Output lines without the passwords of the node's indexes."""

    def __init__(self, told: Told, secrets: Sequence[str]) -> None:
        self._told, self._secrets = told, sorted(secrets, key=len, reverse=True)
        self._rest = b""
        self._last: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def has_secrets(self) -> bool:
        return bool(self._secrets)

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
