"""`torch.distributed` in one ordinary sandbox: several processes find each other over the sandbox's own loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.agent.runtime.protocol import SandboxLimits, StagedInput
from tests.tools.runtimes import command, using

LIMITS = SandboxLimits(cpu_milli=2000, memory_bytes=4 << 30, disk_bytes=256 << 20)
SCRIPT = """
import ctypes, json, os, socket, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def member(rank, world, port, answers):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    held = torch.full((1 << 16,), float(rank + 1))
    dist.all_reduce(held)
    answers.put((rank, held[0].item(), held[-1].item()))
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return any_socket.getsockname()[1]


if __name__ == "__main__":
    found = ctypes.c_void_p()
    told = {"getifaddrs": ctypes.CDLL(None).getifaddrs(ctypes.byref(found))}
    told["interfaces"] = [name for _, name in socket.if_nameindex()]
    for world in (2, 4):
        context = processes.get_context("fork")
        answers = context.SimpleQueue()
        port = free_port()
        members = [
            context.Process(target=member, args=(rank, world, port, answers)) for rank in range(world)
        ]
        for one in members:
            one.start()
        told[str(world)] = sorted(answers.get() for _ in members)
        for one in members:
            one.join()
        told[f"codes {world}"] = [one.exitcode for one in members]
    print(json.dumps(told))
"""


@pytest.mark.slow
def test_two_and_four_processes_reduce_by_gloo_in_an_ordinary_sandbox(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("torch")
    script = tmp_path / "members.py"
    script.write_text(SCRIPT)
    data = tmp_path / "data"
    data.mkdir()
    ran = using(
        "bubblewrap",
        data,
        lambda runtime: command(
            runtime,
            "python",
            "members.py",
            inputs=[StagedInput("members.py", script, False)],
            limits=LIMITS,
        ),
    )
    assert ran.ended.exit_code == 0, ran.err
    told = json.loads(ran.out)
    assert (told["getifaddrs"], told["interfaces"]) == (0, ["lo"])
    for world in (2, 4):
        total = float(sum(range(1, world + 1)))
        assert told[str(world)] == [[rank, total, total] for rank in range(world)]
        assert told[f"codes {world}"] == [0] * world
