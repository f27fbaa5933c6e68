"""On a real card that nobody uses, as root: instances come and go where asked, and memory is cleaned and checked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpool.agent.machine.nvml import NvmlError
from gpool.agent.machine.real_nvml import RealNvml
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.devices import CONTROL_NODES, capability_nodes, device_nodes
from gpool.agent.runtime.protocol import GpuShare
from gpool.agent.sharing import modes
from gpool.agent.sharing.memory import Scrubbed, fault, scrub
from gpool.core.model import GIB, Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(os.geteuid() != 0, reason="only root may")]


@pytest.fixture
def nvml(require: Callable[[str], None]) -> Iterator[RealNvml]:
    require("gpu")
    made = RealNvml()
    made.open()
    before = modes.record(made, made.uuids()[0])
    yield made
    modes.restore(made, made.uuids()[0], before)
    made.close()


def test_instances_are_made_where_asked_listed_and_unmade(nvml: RealNvml) -> None:
    uuid = nvml.uuids()[0]
    card = nvml.card(uuid)
    if card.mig is None:
        pytest.skip("this card has no MIG")
    nvml.set_mig(uuid, True)
    small = min(nvml.mig_profiles(uuid), key=lambda one: (one.memory_bytes, one.id))
    first = nvml.make_mig(uuid, small.id, small.starts[-1])
    second = nvml.make_mig(uuid, small.id, small.starts[0])
    assert (first.start, second.start) == (small.starts[-1], small.starts[0])
    assert {one.uuid for one in nvml.mig_instances(uuid)} == {first.uuid, second.uuid}
    with pytest.raises(NvmlError):
        nvml.make_mig(uuid, small.id, small.starts[0])
    assert len(capability_nodes(card.minor or 0, first.id, first.compute)) == 2
    nvml.unmake_mig(uuid, first.id)
    nvml.unmake_mig(uuid, second.id)
    assert nvml.mig_instances(uuid) == ()


def test_all_free_memory_is_overwritten_and_checked(nvml: RealNvml, tmp_path: Path) -> None:
    uuid = nvml.uuids()[0]
    nodes = device_nodes([Gpu(0, uuid, "", "nvidia", GIB)]) or CONTROL_NODES

    async def run() -> Scrubbed:
        runtime = BubblewrapRuntime(tmp_path)
        try:
            return await scrub(runtime, GpuShare(nodes, (("CUDA_VISIBLE_DEVICES", uuid),)))
        finally:
            await runtime.close()

    told = asyncio.run(run())
    assert fault(told) == ""
    assert told.scrubbed > 0.9 * nvml.card(uuid).memory_bytes
