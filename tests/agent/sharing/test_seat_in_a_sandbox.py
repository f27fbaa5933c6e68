"""A real sandbox with a seat: what was got ready is there, wins over the task's own word, and tells its processes apart."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.cgroups import is_in
from gpool.agent.runtime.devices import capability_minors
from gpool.agent.runtime.protocol import CommandJob, GpuShare, SandboxLimits
from gpool.core.model import GIB, EndReason

LIMITS = SandboxLimits(1000, GIB)
CONNECTS = """
import os, socket
print(os.environ["CUDA_VISIBLE_DEVICES"], os.listdir("/tmp/nvidia-mps"))
with socket.socket(socket.AF_UNIX) as door:
    door.connect("/tmp/nvidia-mps/control")
    print("connected")
"""


@pytest.fixture
def door() -> Iterator[Path]:
    """A socket that any uid reaches, as the MPS daemon's is."""
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as listening:
        Path(name).chmod(0o755)
        path = Path(name) / "control"
        listening.bind(str(path))
        path.chmod(0o666)
        listening.listen()
        yield path


def test_a_seat_brings_its_socket_and_its_variables_win(tmp_path: Path, door: Path) -> None:
    async def run() -> bytes:
        runtime = BubblewrapRuntime(tmp_path)
        seat = GpuShare(
            ("/dev/null",),
            (("CUDA_VISIBLE_DEVICES", "MIG-1"),),
            (("/tmp/nvidia-mps/control", door),),
        )
        own = (("CUDA_VISIBLE_DEVICES", "GPU-all"),)
        job = CommandJob(("python3", "-c", CONNECTS), own, (), (), LIMITS, gpu_share=seat)
        try:
            sandbox = await runtime.start_command(job)
            said = b"".join([data async for _, data in sandbox.output()])
            await sandbox.remove()
            return said
        finally:
            await runtime.close()

    assert asyncio.run(run()).decode().split() == ["MIG-1", "['control']", "connected"]


def test_what_exceeds_its_slice_is_told_from_its_neighbour_and_ends_for_that_reason(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        runtime = BubblewrapRuntime(tmp_path)
        if not runtime.tells_apart:
            await runtime.close()
            pytest.skip("there are no control groups here")
        seats = [GpuShare(), GpuShare()]
        boxes = []
        for seat in seats:
            job = CommandJob(("sh", "-c", "echo on; sleep 600"), (), (), (), LIMITS, gpu_share=seat)
            boxes.append(await runtime.start_command(job))
            async for _ in boxes[-1].output():
                break  # it runs
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        first, second = (
            {pid for pid in pids if seat.owns is not None and seat.owns(pid)} for seat in seats
        )
        assert first
        assert second
        assert first.isdisjoint(second)
        assert os.getpid() not in first | second
        assert seats[0].kill is not None
        seats[0].exceeded = "it held 7 GiB of GPU memory, more than its GPU memory slice of 6 GiB"
        await seats[0].kill()
        ended = await boxes[0].ended()
        assert (ended.reason, ended.detail) == (EndReason.OUT_OF_MEMORY, seats[0].exceeded)
        await boxes[1].kill()
        assert (await boxes[1].ended()).reason is EndReason.EXITED  # the control
        for box in boxes:
            await box.remove()
        await runtime.close()

    asyncio.run(run())


def test_an_instance_is_opened_by_its_own_two_nodes() -> None:
    listed = (
        "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi11/access 102\n"
    )
    assert capability_minors(listed, 0, 1, 0) == (12, 13)
    assert capability_minors(listed, 0, 11, 0) == (102,)
    assert capability_minors(listed, 1, 1, 0) == ()
    assert capability_minors("", 0, 0, 0) == ()


def test_a_process_that_has_ended_is_nobodys() -> None:
    assert not is_in(2**22 + 1, "gpool")
