"""Environments on this node by name: built once for all requests, kept while in use, evicted least recently used.

An environment never changes: after `forget` the next request builds another, and the old one is removed after its last
user. One name is one spec: tasks share a build only if they requested the same packages.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from gpool.agent.environments.interpreters import (
    MANIFEST,
    MOST_FILES,
    TREE,
    Interpreter,
    Manifest,
    lay_bare,
    measured,
    read_manifest,
    write_manifest,
)
from gpool.agent.environments.interpreters import flush as flush_tree
from gpool.agent.environments.interpreters import remove as remove_tree
from gpool.agent.environments.limits import BuildDisk, covers
from gpool.agent.runtime.protocol import (
    ENVIRONMENT_AT,
    PreparedEnvironment,
    SandboxFailed,
    SandboxLimits,
)
from gpool.core.errors import Invalid
from gpool.core.model import GIB, EndReason, Recipe
from gpool.core.specs import fields

log = structlog.get_logger(__name__)

REMEMBERED_US = 60 * 1_000_000
MOST_LINES = 1000  # of a build's output, kept for later requests
BUILDS_AT_ONCE = 8  # concurrent builds; more only slow each other down

Told = Callable[[str], None]
"""Receives a build's progress, line by line."""


class BuildFailed(SandboxFailed):
    """No such node can build it; the text goes to the consumer."""

    reason = EndReason.BAD_INPUT


class Builder(Protocol):
    async def build(
        self,
        recipe: Recipe,
        interpreter: Interpreter,
        into: Path,
        told: Told,
        limits: SandboxLimits,
    ) -> None:
        """Create the virtual environment `into`, which must not exist: read-only, owned by the agent. Uses at most `limits`.

        Raises `BuildFailed` if the spec is at fault, else `SandboxFailed`.
        """
        ...


@dataclass(slots=True)
class _Entry:
    folder: Path
    manifest: Manifest
    users: int = 0
    dropped: bool = False  # removed after its last user


_Key = tuple[str, str]  # name, minor


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[_Entry]
    limits: SandboxLimits  # of the request that began it
    asking: list[SandboxLimits] = field(default_factory=list)  # of those who wait
    lines: list[str] = field(default_factory=list)
    listeners: list[Told] = field(default_factory=list)
    landed: bool = False  # all waiters are counted as users

    @property
    def is_covered(self) -> bool:
        """Return whether a waiting lease is as large as the build: else it would use more than is leased."""
        return any(covers(one, self.limits) for one in self.asking)


def _silent(_line: str) -> None:
    return


class Environments:
    """`clock` counts microseconds; `free_bytes` returns the lent part of the disk. Call `sweep` once before the first `prepare`."""

    def __init__(
        self,
        folder: Path,
        builder: Builder,
        *,
        limit_bytes: int = 20 * GIB,
        interpreters: Mapping[str, Interpreter],
        own: str,
        clock: Callable[[], int],
        free_bytes: Callable[[], int] = lambda: 1 << 62,
    ) -> None:
        self._ready = folder.resolve() / "ready"
        self._building = folder.resolve() / "building"
        self._builder = builder
        self._limit = limit_bytes
        self._interpreters = dict(interpreters)
        self._own = own
        self._clock = clock
        self._disk = BuildDisk(free_bytes)
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # least recently used first
        self._total = 0  # bytes on disk, including dropped ones in use
        self._flights: dict[_Key, _Flight] = {}
        self._failed: dict[_Key, tuple[int, str]] = {}
        self._at_once = asyncio.Semaphore(BUILDS_AT_ONCE)
        self._removing: set[asyncio.Task[None]] = set()
        for path in (self._ready, self._building):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    # ---- queries

    def ready(self) -> frozenset[str]:
        """Names that need no build. Thread-safe."""
        return frozenset(
            name for name, _ in tuple(self._entries) if name != fields.DEFAULT_ENVIRONMENT
        )

    def pythons(self) -> frozenset[str]:
        return frozenset(self._interpreters)

    def manifest(self, name: str, recipe: Recipe) -> Manifest | None:
        entry = self._entries.get((name, recipe.python or self._own))
        return entry.manifest if entry is not None else None

    @property
    def size_bytes(self) -> int:
        return self._total

    # ---- interface

    @asynccontextmanager
    async def prepare(
        self,
        name: str,
        recipe: Recipe | None,
        told: Told = _silent,
        limits: SandboxLimits | None = None,
    ) -> AsyncIterator[PreparedEnvironment | None]:
        """Keep an environment during the block; None: the agent's own Python serves. A build uses the `limits` of the lease that
        asks; without a lease none is begun. Raises `BuildFailed`, `SandboxFailed`, or `Invalid` if name and spec differ.
        """
        key = self._key_of(name, recipe)
        if key is None or recipe is None:
            yield None
            return
        entry = None
        while entry is None:
            entry = self._entries.get(key)
            if entry is None:
                if limits is None:
                    raise SandboxFailed(f"{name[:80]} is not built, and no lease asks for it")
                entry = await self._built(key, recipe, told, limits)
            else:
                entry.users += 1
                self._entries.move_to_end(key)
        try:
            interpreter = self._interpreters[key[1]]
            program = f"{ENVIRONMENT_AT}/bin/python"
            yield PreparedEnvironment(name, entry.folder / TREE, program, interpreter.binds)
        finally:
            self._release(entry)

    def forget(self, name: str) -> None:
        """The next request builds anew, with newer unpinned packages."""
        for key in [key for key in self._entries if key[0] == name]:
            self._drop(key)
        for key in [key for key in self._failed if key[0] == name]:
            del self._failed[key]

    async def sweep(self) -> None:
        """Load environments of an earlier agent; remove unfinished and unusable ones."""
        found = await asyncio.to_thread(self._found)
        for entry in found:
            manifest = entry.manifest
            self._entries[(manifest.name, manifest.python)] = entry
            self._total += manifest.size_bytes
        self._shrink()

    async def close(self) -> None:
        flights = [flight.task for flight in self._flights.values()]
        for task in flights:
            task.cancel()
        if waiting := {*flights, *self._removing}:
            await asyncio.wait(waiting)

    # ---- builds

    def _key_of(self, name: str, recipe: Recipe | None) -> _Key | None:
        """Check the name against the spec: the node does not trust the server for it."""
        asked = recipe or Recipe()
        if fields.recipe(asked.python, asked.packages, asked.image) != asked:
            raise Invalid(f"the environment spec of {name[:80]} is not in normal form")
        if fields.environment_name(asked) != name:
            raise Invalid(f"{name[:80]} is not the name of its environment spec")
        if asked.image:
            raise Invalid(f"{name[:80]} is an image; only a container runtime provides it")
        python = asked.python or self._own
        if python not in self._interpreters:
            there = ", ".join(sorted(self._interpreters))
            raise Invalid(f"there is no Python {python} on this node; it has {there}")
        if not asked.packages and python == self._own:
            return None
        return name, python

    def _found(self) -> list[_Entry]:
        for left in self._building.iterdir():
            remove_tree(left)
        entries: dict[_Key, tuple[int, _Entry]] = {}
        for folder in self._ready.iterdir():
            manifest = read_manifest(folder)
            known = self._interpreters.get(manifest.python) if manifest is not None else None
            if manifest is None or known is None or known.program != manifest.program:
                remove_tree(folder)
                continue
            used = (folder / MANIFEST).stat().st_mtime_ns
            key = (manifest.name, manifest.python)
            older = entries.get(key)
            if older is not None and older[0] >= used:
                remove_tree(folder)
                continue
            if older is not None:
                remove_tree(older[1].folder)
            entries[key] = (used, _Entry(folder, manifest))
        return [entry for _, entry in sorted(entries.values(), key=lambda one: one[0])]

    async def _built(
        self, key: _Key, recipe: Recipe, told: Told, limits: SandboxLimits
    ) -> _Entry | None:
        """Share one build and count the caller as a user. It is cancelled (None for the others) if no lease as large waits."""
        failed = self._failed.get(key)
        if failed is not None:
            left_us = failed[0] - self._clock()
            if left_us > 0:
                again = f"(this node tries it again in {left_us // 1_000_000 + 1} s)"
                raise BuildFailed(f"{failed[1]}\n{again}")
            del self._failed[key]
        flight = self._flights.get(key)
        if flight is None:
            lines: list[str] = []
            listeners: list[Told] = []
            task = asyncio.create_task(self._fly(key, recipe, limits, lines, listeners))
            flight = self._flights[key] = _Flight(task, limits, [], lines, listeners)
            task.add_done_callback(lambda done: self._landed(key, done))
        for line in flight.lines:
            told(line)
        flight.listeners.append(told)
        flight.asking.append(limits)
        asking = asyncio.current_task()
        try:
            entry = await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if asking is None or not asking.cancelling():
                return None
            if flight.landed and not flight.task.cancelled() and not flight.task.exception():
                self._release(flight.task.result())
            elif not flight.task.done():
                flight.asking.remove(limits)
                covered = flight.is_covered
                flight.asking.append(limits)
                if not covered:
                    flight.task.cancel()
                    await asyncio.wait([flight.task])
            raise
        finally:
            flight.asking.remove(limits)
            flight.listeners.remove(told)
        return entry

    def _landed(self, key: _Key, done: asyncio.Task[_Entry]) -> None:
        flight = self._flights.pop(key)
        flight.landed = True
        if done.cancelled():
            return
        failure = done.exception()
        if failure is None:
            entry = done.result()
            entry.users += len(flight.asking)
            self._entries[key] = entry
            self._total += entry.manifest.size_bytes
            self._shrink()
        elif isinstance(failure, BuildFailed):
            now = self._clock()
            self._failed = {k: told for k, told in self._failed.items() if told[0] > now}
            self._failed[key] = (now + REMEMBERED_US, str(failure))

    async def _fly(
        self,
        key: _Key,
        recipe: Recipe,
        limits: SandboxLimits,
        lines: list[str],
        listeners: list[Told],
    ) -> _Entry:
        def told(line: str) -> None:
            if len(lines) < MOST_LINES:
                lines.append(line)
            for listener in tuple(listeners):
                listener(line)

        name, python = key
        interpreter = self._interpreters[python]
        async with self._at_once:
            place = self._building / secrets.token_hex(8)
            place.mkdir(mode=0o755)
            tree = place / TREE
            try:
                if recipe.packages:
                    with self._disk.reserved(limits) as given:
                        await self._builder.build(recipe, interpreter, tree, told, given)
                else:
                    lay_bare(tree, interpreter)
                found = await asyncio.to_thread(measured, tree)
                if found.files > MOST_FILES:
                    raise BuildFailed(f"the environment contains more than {MOST_FILES} files")
                if found.size_bytes > self._limit:
                    raise BuildFailed(
                        f"the environment takes {found.size_bytes} bytes; this node keeps at most {self._limit}"
                    )
                manifest = Manifest(
                    name,
                    python,
                    interpreter.program,
                    recipe.packages,
                    found.chosen,
                    found.size_bytes,
                )
                write_manifest(place, manifest)
                await asyncio.to_thread(flush_tree, place)
                folder = self._ready / f"{python}-{place.name}"
                place.rename(folder)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(remove_tree, place))
                raise
        if found.chosen:
            told(f"environment of Python {python} with {' '.join(found.chosen)}")
        log.info("environment_built", name=name, python=python, bytes=found.size_bytes)
        return _Entry(folder, manifest)

    def _release(self, entry: _Entry) -> None:
        entry.users -= 1
        if not entry.dropped:
            with suppress(OSError):  # keeps the order of use over a restart
                os.utime(entry.folder / MANIFEST)
        elif not entry.users:
            self._remove(entry)
        self._shrink()

    def _shrink(self) -> None:
        for key in list(self._entries):
            if self._total <= self._limit:
                return
            if not self._entries[key].users:
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key)
        entry.dropped = True
        if not entry.users:
            self._remove(entry)

    def _remove(self, entry: _Entry) -> None:
        self._total -= entry.manifest.size_bytes
        going = self._building / f"gone-{entry.folder.name}"
        entry.folder.rename(going)  # a half-removed folder must not have a valid name
        removing = asyncio.create_task(asyncio.to_thread(remove_tree, going))
        self._removing.add(removing)
        removing.add_done_callback(self._removed)

    def _removed(self, done: asyncio.Task[None]) -> None:
        self._removing.discard(done)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("environment_not_removed", exc_info=error)
