"""A sandbox with GPUs runs on the CPUs of their NUMA node, and its libraries start as many threads as it has CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.machine.numa import NumaNode
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.docker.containers import Gvisor
from gpool.agent.runtime.docker.engine import EngineClient
from gpool.agent.runtime.docker.runtime import DockerRuntime
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import CommandJob
from gpool.core.model import GIB, Gpu, GpuDetails, Slice
from tests.tools import engines
from tests.tools.runtimes import LIMITS, PATIENCE_S, within

RUNTIMES = {"bubblewrap": BubblewrapRuntime, "process": ProcessRuntime}
SEES = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
GPUS = [
    Gpu(index, f"GPU-{index}", "X", "nvidia", GIB, simulated=True, details=GpuDetails(numa=index))
    for index in range(2)
]


def two_nodes() -> tuple[NumaNode, NumaNode]:
    """The machine's CPUs as two NUMA nodes of one GPU each."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU cannot be two NUMA nodes")
    half = len(cpus) // 2
    first, second = frozenset(cpus[:half]), frozenset(cpus[half:])
    return NumaNode(0, first, (10, 21)), NumaNode(1, second, (21, 10))


def made(kind: str, data: Path) -> Any:
    if kind in RUNTIMES:
        return RUNTIMES[kind](data, gpus=GPUS, numa=two_nodes())
    return DockerRuntime(
        data,
        gpus=GPUS,
        numa=two_nodes(),
        engine=engines.shared_engine(kind).address,
        default_image=engines.IMAGE,
        gvisor=Gvisor.NEVER,  # it numbers the CPUs of a sandbox from zero
    )


def seen(
    kind: str, data: Path, gpus: Sequence[int], cpus: float, env: tuple[tuple[str, str], ...] = ()
) -> str:
    slices = tuple(Slice(index, GIB, 1000) for index in gpus)
    limits = replace(LIMITS, cpu_milli=round(cpus * 1000))

    async def whole() -> str:
        runtime = made(kind, data)
        await runtime.sweep()
        try:
            job = CommandJob(("python3", "-c", SEES), env, (), slices, limits)
            sandbox = await runtime.start_command(job)
            said = b"".join([data async for _, data in sandbox.output()])
            ended = await sandbox.ended()
            await sandbox.remove()
        finally:
            await runtime.close()
        assert ended.exit_code == 0, said
        return said.decode().strip()

    return within(whole(), PATIENCE_S)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_task_runs_on_the_cpus_of_its_gpus_numa_node(kind: str, tmp_path: Path) -> None:
    first, second = two_nodes()
    assert seen(kind, tmp_path, [1], 1) == f"{sorted(second.cpus)} 1"
    assert seen(kind, tmp_path, [0], 1) == f"{sorted(first.cpus)} 1"


@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_task_without_gpu_or_with_more_cpus_runs_on_all(kind: str, tmp_path: Path) -> None:
    every = sorted(os.sched_getaffinity(0))
    assert seen(kind, tmp_path, [], 1) == f"{every} 1"
    many = len(two_nodes()[0].cpus) + 1
    assert seen(kind, tmp_path, [0], many) == f"{every} {many}"


@pytest.mark.parametrize("kind", RUNTIMES)
def test_threads_are_divided_by_gpus_and_the_task_may_choose(kind: str, tmp_path: Path) -> None:
    assert seen(kind, tmp_path, [0, 1], 4).endswith(" 2")
    assert seen(kind, tmp_path, [], 0.5).endswith(" 1")
    assert seen(kind, tmp_path, [], 4, (("OMP_NUM_THREADS", "3"),)).endswith(" 3")


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_container_runs_on_the_cpus_of_its_gpus_numa_node(
    kind: str, tmp_path: Path, require: Callable[[str], None]
) -> None:
    require(kind)
    client = EngineClient(engines.shared_engine(kind).address)
    has_cpusets = client.facts.cpusets
    client.close()
    first, second = two_nodes()
    every = sorted(first.cpus | second.cpus)
    # An engine without the cpuset controller refuses containers with one: they run on all CPUs.
    wanted = [sorted(second.cpus), sorted(first.cpus)] if has_cpusets else [every, every]
    assert seen(kind, tmp_path / "1", [1], 1) == f"{wanted[0]} 1"
    assert seen(kind, tmp_path / "0", [0], 1) == f"{wanted[1]} 1"
    assert seen(kind, tmp_path / "none", [], 1) == f"{every} 1"
