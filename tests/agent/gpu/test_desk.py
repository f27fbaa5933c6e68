"""The agent's desk for GPUs: a child for each trial, its frames passed on, and gone when the trial is over."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from gpool.agent.gpu_verification.cuda import kernels_for
from gpool.agent.gpu_verification.service import CHILD, GpuVerificationService
from gpool.core.gpu_verification import GpuVerdict, Size, keys_of
from gpool.server.nodes.gpu_checks import Claimed, check_openings
from gpool.wire.frames import (
    AgentFrame,
    AnswerNow,
    ExamineGpu,
    GpuAnswered,
    GpuCommitted,
    GpuJudged,
    GpuOpened,
    GpuUnable,
    MeasureGpu,
    OpenTiles,
)
from tests.tools.components import missing
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio
F = TypeVar("F", bound=AgentFrame)
HERE = Path(__file__)
NUMPY_CHILD = (
    *("env", f"PYTHONPATH={HERE.parents[3]}"),  # where `tests` is found
    *(sys.executable, str(HERE.with_name("numpy_child.py"))),
)
SIZE = Size(1, 256, 64)
ASKED = ExamineGpu(7, 3, "GPU-a", b"s" * 32, SIZE, 2)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Heard:
    def __init__(self, child: Sequence[str]) -> None:
        self.frames: asyncio.Queue[AgentFrame] = asyncio.Queue()
        self.desk = GpuVerificationService(self.frames.put_nowait, child)

    async def next(self, kind: type[F]) -> F:
        async with asyncio.timeout(PATIENCE_S):
            frame = await self.frames.get()
        assert isinstance(frame, kind), frame
        return frame


async def test_a_trial_goes_through_a_child_process_and_passes() -> None:
    heard = Heard(NUMPY_CHILD)
    heard.desk.take(ASKED)
    root = (await heard.next(GpuCommitted)).root
    heard.desk.take(AnswerNow(7, b"n" * 32))
    roots = (await heard.next(GpuAnswered)).roots
    heard.desk.take(OpenTiles(7, (3, 1)))
    openings = (await heard.next(GpuOpened)).openings
    claimed = Claimed(SIZE, keys_of(b"s" * 32, 3, "GPU-a", 7), b"n" * 32, root, roots)
    assert check_openings(claimed, (3, 1), openings, b"d") is GpuVerdict.PASSED
    heard.desk.take(GpuJudged(7, GpuVerdict.PASSED, "fine"))
    await heard.desk.close()


async def test_a_child_that_dies_without_a_word_is_reported() -> None:
    heard = Heard((sys.executable, "-c", "raise SystemExit(3)"))
    heard.desk.take(ASKED)
    assert (await heard.next(GpuUnable)).trial == 7
    await heard.desk.close()


async def test_a_child_that_talks_nonsense_is_reported() -> None:
    program = "import sys; sys.stdout.buffer.write(bytes([1, 0, 0, 0, 255])); sys.stdout.flush(); sys.stdin.read()"
    heard = Heard((sys.executable, "-c", program))
    heard.desk.take(ASKED)
    assert "something else" in (await heard.next(GpuUnable)).why
    await heard.desk.close()


async def test_a_verdict_ends_a_child_that_still_computes() -> None:
    heard = Heard((sys.executable, "-c", "import time; time.sleep(600)"))
    heard.desk.take(ASKED)
    heard.desk.take(GpuJudged(7, GpuVerdict.LATE_COMMIT, "late"))
    assert (await heard.next(GpuUnable)).trial == 7
    heard.desk.take(ASKED)
    heard.desk.end_all()
    assert (await heard.next(GpuUnable)).trial == 7
    await heard.desk.close()


async def test_frames_of_no_trial_are_left_alone() -> None:
    heard = Heard(NUMPY_CHILD)
    heard.desk.take(AnswerNow(1, b"n" * 32))
    heard.desk.take(GpuJudged(1, GpuVerdict.PASSED, ""))
    await heard.desk.close()
    assert heard.frames.empty()


@pytest.mark.skipif(missing("gpu") is None, reason="there is a GPU here")
async def test_without_a_driver_the_real_child_says_so() -> None:
    heard = Heard(CHILD)
    heard.desk.take(MeasureGpu("GPU-a"))
    said = await heard.next(GpuUnable)
    assert (said.trial, said.uuid) == (0, "GPU-a")
    assert "driver" in said.why
    await heard.desk.close()


def test_the_committed_kernels_are_those_of_the_source() -> None:
    import hashlib  # noqa: PLC0415
    from importlib import resources  # noqa: PLC0415

    source = (resources.files("gpool.agent.gpu_verification") / "kernels.cu").read_bytes()
    stamp = f"// source sha256 {hashlib.sha256(source).hexdigest()}\n".encode()
    for capability in ((7, 5), (8, 0), (9, 0)):
        assert kernels_for(capability).startswith(stamp)
