"""GPU measurements and verifications: a child process each."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import Callable, Sequence

import structlog

from gpool.wire.frames import (
    AgentFrame,
    AnswerNow,
    ExamineGpu,
    GpuJudged,
    GpuUnable,
    Malformed,
    MeasureGpu,
    OpenTiles,
    ToGpu,
    decode_from_agent,
    encode,
)

LENGTH = struct.Struct("<I")
CHILD = (sys.executable, "-m", "gpool.agent.gpu_verification.child")
MOST_CHILDREN = 32
MEASURE_WITHIN_S = 60.0
TRIAL_WITHIN_S = 300.0

log = structlog.get_logger(__name__)


class GpuVerificationService:
    """`send` puts a frame on the channel. One child per verification; a measurement is number 0 of its GPU."""

    def __init__(self, send: Callable[[AgentFrame], None], child: Sequence[str] = CHILD) -> None:
        self._send = send
        self._child = tuple(child)
        self._inboxes: dict[tuple[int, str], asyncio.Queue[ToGpu | None]] = {}
        self._by_trial: dict[int, tuple[int, str]] = {}
        self._running: set[asyncio.Task[None]] = set()

    def take(self, frame: ToGpu) -> None:
        match frame:
            case MeasureGpu():
                self._begin((0, frame.uuid), frame)
            case ExamineGpu():
                self._by_trial[frame.trial] = (frame.trial, frame.uuid)
                self._begin((frame.trial, frame.uuid), frame)
            case AnswerNow() | OpenTiles():
                if (key := self._by_trial.get(frame.trial)) in self._inboxes:
                    self._inboxes[key].put_nowait(frame)
            case GpuJudged():
                log.info("gpu_judged", verdict=frame.verdict.value, text=frame.text)
                if (key := self._by_trial.get(frame.trial)) in self._inboxes:
                    self._inboxes[key].put_nowait(None)

    def end_all(self) -> None:
        for inbox in self._inboxes.values():
            inbox.put_nowait(None)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _begin(self, key: tuple[int, str], first: MeasureGpu | ExamineGpu) -> None:
        if key in self._inboxes or len(self._inboxes) >= MOST_CHILDREN:
            return
        self._inboxes[key] = asyncio.Queue()
        self._inboxes[key].put_nowait(first)
        task = asyncio.create_task(self._keep(key))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _keep(self, key: tuple[int, str]) -> None:
        trial, uuid = key
        inbox = self._inboxes[key]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*self._child, stdin=pipe, stdout=pipe)
        feeding = asyncio.create_task(_feed(child, inbox))
        why = "its process ended without an answer"
        try:
            async with asyncio.timeout(TRIAL_WITHIN_S if trial else MEASURE_WITHIN_S):
                said = await self._pass_on(child)
        except TimeoutError:
            said, why = False, "it took too long"
        except Malformed as error:
            said, why = False, f"its process said something else: {error}"
        finally:
            feeding.cancel()
            if child.returncode is None:
                child.kill()
            await child.wait()
            del self._inboxes[key]
            self._by_trial.pop(trial, None)
        if not said:
            log.warning("gpu_unable", uuid=uuid, why=why)
            self._send(GpuUnable(trial, uuid, why))

    async def _pass_on(self, child: asyncio.subprocess.Process) -> bool:
        assert child.stdout is not None
        said = False
        while True:
            try:
                head = await child.stdout.readexactly(LENGTH.size)
                data = await child.stdout.readexactly(LENGTH.unpack(head)[0])
            except asyncio.IncompleteReadError:
                return said
            self._send(decode_from_agent(data))
            said = True


async def _feed(child: asyncio.subprocess.Process, inbox: asyncio.Queue[ToGpu | None]) -> None:
    assert child.stdin is not None
    while (frame := await inbox.get()) is not None:
        data = encode(frame)
        child.stdin.write(LENGTH.pack(len(data)) + data)
        await child.stdin.drain()
    if child.returncode is None:
        child.kill()  # it may still compute
