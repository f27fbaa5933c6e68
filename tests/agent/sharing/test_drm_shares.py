"""AMD and Intel GPUs in sandboxes: whole cards, one task at a time, their own nodes only, and nobody before the last is gone."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpool.agent.machine.drm import DrmCards
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.devices import visible_variables
from gpool.agent.runtime.protocol import CommandJob, GpuShare, PartFailed, SandboxLimits
from gpool.agent.services import NodeGpuShares
from gpool.agent.sharing.drm_shares import DrmShares
from gpool.core.model import GIB, MIB, Gpu, Sharing, Slice
from tests.agent.detect.drm_tree import DrmMachine
from tests.tools.processes import PATIENCE_S, eventually
from tests.tools.runtimes import within

LIMITS = SandboxLimits(1000, GIB)
RENDER_GID = 23_450  # no group of this host
MI210 = "amd-mi210-x2"
LOOKS = """
import json, os, sys
found = {}
for node in sys.argv[1:]:
    try:
        with open(node, "r+b", buffering=0) as device:
            device.write(b"x")
        found[os.path.basename(node)] = "opened"
    except OSError as error:
        found[os.path.basename(node)] = type(error).__name__
names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
found["variables"] = {name: os.environ[name] for name in names if name in os.environ}
found["topology"] = os.path.isdir("/sys/devices/system")
print(json.dumps(found))
"""


@pytest.fixture
def walkable() -> Iterator[Path]:
    """A directory that any uid reaches; pytest's own are ours alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def slices(gpus: Sequence[Gpu], *indexes: int) -> list[Slice]:
    return [Slice(index, gpus[index].memory_bytes, 1000) for index in indexes]


def shares_of(machine: DrmMachine, ours: set[int], **more: float) -> DrmShares:
    shares = DrmShares(machine.cards, ours.__contains__, **more)
    shares.use_gpus(machine.gpus)
    return shares


def looked(machine: DrmMachine, data: Path, *leased: int) -> dict[str, object]:
    """Devices and variables of a task in a real sandbox with these cards leased."""

    async def run() -> bytes:
        runtime = BubblewrapRuntime(data)
        shares = shares_of(machine, set())
        nodes = [str(node) for node in sorted((machine.roots.dev / "dri").glob("renderD*"))]
        nodes.append(str(machine.roots.dev / "kfd"))
        try:
            async with shares.seat(slices(machine.gpus, *leased)) as share:
                argv = ("python3", "-c", LOOKS, *nodes)
                own = (("ROCR_VISIBLE_DEVICES", "0,1,2,3"),)
                sandbox = await runtime.start_command(
                    CommandJob(argv, own, (), (), LIMITS, gpu_share=share)
                )
                said = b"".join([text async for _, text in sandbox.output()])
                await sandbox.remove()
                return said
        finally:
            await shares.close()
            await runtime.close()

    found: dict[str, object] = json.loads(asyncio.run(run()))
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_sandbox_opens_the_nodes_of_its_card_by_their_group_and_no_other_card(
    walkable: Path, tmp_path: Path
) -> None:
    machine = DrmMachine(walkable, MI210, real_nodes=True)
    for node in (machine.roots.dev / "kfd", *(machine.roots.dev / "dri").iterdir()):
        os.chown(node, 0, RENDER_GID)
    found = looked(machine, tmp_path, 1)
    assert (found["renderD129"], found["kfd"]) == ("opened", "opened")
    assert found["renderD128"] == "FileNotFoundError"
    assert found["topology"] is True
    visible = {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert found["variables"] == visible, "the share's variables override the task's"
    both = looked(machine, tmp_path, 0, 1)
    assert (both["renderD128"], both["renderD129"]) == ("opened", "opened")
    assert both["variables"] == dict.fromkeys(visible, "0,1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_sandbox_that_holds_a_card_is_found_in_the_hosts_own_proc(
    walkable: Path, tmp_path: Path
) -> None:
    """The sandbox has another /dev and another /proc; the kernel names its descriptors all the same."""
    machine = DrmMachine(walkable, MI210, real_nodes=True)
    for node in (machine.roots.dev / "kfd", *(machine.roots.dev / "dri").iterdir()):
        os.chown(node, 0, RENDER_GID)
    cards = DrmCards(replace(machine.roots, proc=Path("/proc")))

    async def run() -> None:
        runtime = BubblewrapRuntime(tmp_path)
        shares = DrmShares(cards, lambda _: False)
        shares.use_gpus(machine.gpus)
        try:
            async with shares.seat(slices(machine.gpus, 1)) as share:
                node = machine.roots.dev / "dri" / "renderD129"
                argv = ("sh", "-c", f"exec 3<>{node}; echo held; exec sleep 600")
                job = CommandJob(argv, (), (), (), LIMITS, gpu_share=share)
                sandbox = await runtime.start_command(job)
                async for _ in sandbox.output():
                    break  # it holds the card
                assert share is not None
                first, second = (cards.processes(gpu) for gpu in machine.gpus)
                assert first == ()
                assert second
                if runtime.tells_apart:
                    assert share.owns is not None
                    assert all(share.owns(process.pid) for process in second)
                await sandbox.remove()
            assert cards.processes(machine.gpus[1]) == ()
        finally:
            await shares.close()
            await runtime.close()

    within(run())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_node_of_the_group_root_is_not_opened_and_its_card_is_closed(
    walkable: Path, tmp_path: Path
) -> None:
    machine = DrmMachine(walkable, MI210, real_nodes=True)
    assert all("chgrp render" in gpu.closed for gpu in machine.gpus)
    found = looked(machine, tmp_path, 1)  # as if it had been leased before
    assert (found["renderD129"], found["kfd"]) == ("PermissionError", "PermissionError")


def test_an_intel_task_sees_its_card_by_level_zero(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, "intel-arc-a770-i915")

    async def run() -> GpuShare:
        shares = shares_of(machine, set())
        async with shares.seat(slices(machine.gpus, 0)) as share:
            assert share is not None
            await shares.close()
            return share

    share = asyncio.run(run())
    assert dict(share.variables) == {
        "ZE_AFFINITY_MASK": "0",
        "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu",
    }
    assert share.nodes == (str(machine.roots.dev / "dri/renderD128"),)


def test_a_process_without_isolation_counts_all_cards_of_the_host(tmp_path: Path) -> None:
    gpus = DrmMachine(tmp_path, MI210).gpus
    found = visible_variables({gpu.index: gpu for gpu in gpus}, slices(gpus, 1))
    assert found == {
        "ROCR_VISIBLE_DEVICES": "1",
        "HIP_VISIBLE_DEVICES": "0",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert visible_variables({}, ()) == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_card_serves_one_task_at_a_time(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, MI210)

    async def run() -> None:
        shares = shares_of(machine, set())
        async with shares.seat(slices(machine.gpus, 0)):
            with pytest.raises(PartFailed, match="still in use"):
                async with shares.seat(slices(machine.gpus, 0, 1)):
                    pass
            async with shares.seat(slices(machine.gpus, 1)):
                pass
        async with shares.seat(slices(machine.gpus, 0, 1)):
            pass
        await shares.close()

    asyncio.run(run())


def test_a_card_takes_nobody_until_the_driver_has_released_the_last_task(tmp_path: Path) -> None:
    machine = DrmMachine(tmp_path, MI210)

    async def run() -> None:
        ours = {11}
        shares = shares_of(machine, ours, drained_within_s=0.05, again_after_s=0.05)
        machine.run(12, 2, vram=GIB)  # the owner's own program: no reason to wait
        async with shares.seat(slices(machine.gpus, 0)):
            machine.run(11, 1, vram=GIB)
        with pytest.raises(PartFailed, match="process 11"):
            async with shares.seat(slices(machine.gpus, 0)):
                pass
        machine.end(11)
        left = machine.kfd_memory(11, "51432", GIB)  # its process is gone, its memory is not
        sharing = NodeGpuShares(None, shares, lend_untested=False)
        first, second = sharing.describe(machine.gpus)
        assert "has not released process 11" in first.closed
        assert not second.closed
        (left / "vram_51432").write_text("0\n")
        await asyncio.to_thread(
            eventually, "the card is free", lambda: not shares.unclean, PATIENCE_S
        )
        async with shares.seat(slices(machine.gpus, 0)):
            pass
        await shares.close()

    within(run())


@pytest.mark.parametrize("lend", [False, True])
def test_cards_are_described_as_exclusive_and_lent_to_strangers_only_if_the_owner_says_so(
    tmp_path: Path, lend: bool
) -> None:
    machine = DrmMachine(tmp_path, MI210)
    sharing = NodeGpuShares(None, shares_of(machine, set()), lend_untested=lend)
    found = sharing.describe([*machine.gpus, Gpu(9, "SIM-1", "H100", "nvidia", GIB, True)])
    assert [(gpu.sharing, gpu.untested) for gpu in found[:2]] == [
        (Sharing.EXCLUSIVE, not lend),
    ] * 2
    assert not found[2].untested


def test_a_task_whose_card_holds_more_host_memory_than_its_limit_is_killed(tmp_path: Path) -> None:
    """The kernel does not charge buffers of a card to the control group of the process."""
    machine = DrmMachine(tmp_path, MI210)

    async def run() -> tuple[list[str], str]:
        shares, killed = shares_of(machine, set()), []
        over = asyncio.Event()

        async def kill(name: str) -> None:
            killed.append(name)
            over.set()

        async with (
            shares.seat(slices(machine.gpus, 0)) as first,
            shares.seat(slices(machine.gpus, 1)) as second,
        ):
            assert first is not None
            assert second is not None
            first.watch(lambda pid: pid == 11, lambda: kill("first"), 512 * MIB)
            second.watch(lambda pid: pid == 12, lambda: kill("second"), 512 * MIB)
            machine.run(11, 1, at=0, vram=GIB, host=600 * MIB)
            machine.run(12, 2, at=1, vram=GIB, host=500 * MIB)  # the control: within its limit
            await over.wait()
            text = first.exceeded
        await shares.close()
        return killed, text

    killed, text = within(run())
    assert killed == ["first"]
    assert text == "its GPU held 600 MiB of the host's memory, more than its 512 MiB of memory"
