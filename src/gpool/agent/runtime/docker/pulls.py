"""Image pulls: one per image at a time, with progress for every waiting task."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

from gpool.agent.network.policy import is_refused
from gpool.agent.runtime.docker.engine import EngineClient
from gpool.agent.runtime.docker.images import ContainerImage, ImagePull, registry_of
from gpool.agent.runtime.protocol import SandboxFailed, StartProgress
from gpool.core.model import EndReason

PULLS = 4  # at once; in their own threads, so that a slow registry delays pulls only
RESOLVE_WITHIN_S = 10.0


class BadImage(SandboxFailed):
    reason = EndReason.BAD_INPUT


@dataclass(slots=True)
class _Pulling:
    work: asyncio.Future[ContainerImage]
    waiting: list[StartProgress]
    layers: int = -1  # finished, as last reported


class ImagePulls:
    """A private address is used only if the owner lists the registry (`registries`): the engine would connect to any host a
    consumer names, in the owner's network.
    """

    def __init__(
        self,
        engine: EngineClient,
        threads: Executor,
        registries: Sequence[str],
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._registries = frozenset(registries)
        self._pullers = ThreadPoolExecutor(PULLS, thread_name_prefix="pull")
        self._pulls: dict[str, _Pulling] = {}

    async def image(self, reference: str, progress: StartProgress) -> ContainerImage:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._engine.find, reference)
        if found is not None:
            return found
        await self._must_be_public(registry_of(reference))
        pulling = self._pulls.get(reference)
        if pulling is None:
            step = partial(self._from_thread, loop)
            work = loop.run_in_executor(self._pullers, self._engine.pull, reference, step)
            pulling = self._pulls[reference] = _Pulling(work, [])
            work.add_done_callback(lambda done: self._finished(reference, done))
        pulling.waiting.append(progress)
        try:
            return await asyncio.shield(pulling.work)
        finally:
            pulling.waiting.remove(progress)

    async def _must_be_public(self, registry: str) -> None:
        if not registry or registry in self._registries:
            return
        host, _, port = registry.partition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_WITHIN_S):
                found = await loop.getaddrinfo(host, port or 443, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as unknown:
            raise SandboxFailed(
                f"the registry {registry} has no address on this node: {unknown}"
            ) from unknown
        if any(is_refused(ip_address(one[4][0])) for one in found):
            raise BadImage(
                f"the registry {registry} lies on a private address; nodes pull from public ones, "
                "and from those their owner names in the policy's [images]"
            )

    def _from_thread(self, loop: asyncio.AbstractEventLoop, pull: ImagePull) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: no task waits any more
            loop.call_soon_threadsafe(self._step, pull)

    def _step(self, pull: ImagePull) -> None:
        pulling = self._pulls.get(pull.image)
        if pulling is not None and len(pull.done) != pulling.layers and not pull.failed:
            pulling.layers = len(pull.done)
            for progress in tuple(pulling.waiting):
                progress(pull.text)

    def _finished(self, reference: str, done: asyncio.Future[ContainerImage]) -> None:
        del self._pulls[reference]
        if not done.cancelled():
            done.exception()  # the waiting tasks have it

    def close(self) -> None:
        self._pullers.shutdown(wait=False, cancel_futures=True)  # the engine may finish a pull
