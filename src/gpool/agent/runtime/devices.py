"""Which device nodes of real GPUs a sandbox gets, and what CUDA is told. Simulated GPUs bring nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpool.core.model import Gpu, Slice

CONTROL_NODES = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
SYSTEM = Path("/sys")
SYSTEM_FOLDERS = ("bus/pci", "devices/pci*", "devices/system", "module/nvidia*")
"""What CUDA and its libraries read of it: where a GPU sits, which processors and memory are near, the driver."""
DRIVER = Path("/proc/driver/nvidia/gpus")


def device_arguments(gpus: Mapping[int, Gpu], slices: Sequence[Slice]) -> list[str]:
    """bwrap's arguments for the real GPUs among the slices; none when there is none."""
    real = [
        gpus[s.gpu_index] for s in slices if s.gpu_index in gpus and not gpus[s.gpu_index].simulated
    ]
    if not real:
        return []
    minors = _minors(DRIVER)
    nodes = [*CONTROL_NODES, *(f"/dev/nvidia{minors.get(gpu.uuid, gpu.index)}" for gpu in real)]
    words = []
    for node in nodes:
        if os.path.exists(node):
            words += ["--dev-bind", node, node]
    words += ["--tmpfs", str(SYSTEM)]
    for folder in SYSTEM_FOLDERS:
        for found in sorted(SYSTEM.glob(folder)):
            words += ["--ro-bind", str(found), str(found)]
    return [*words, "--remount-ro", str(SYSTEM)]


def visible_devices(gpus: Mapping[int, Gpu], slices: Sequence[Slice]) -> str:
    """For CUDA_VISIBLE_DEVICES: uuids of real GPUs, plain numbers of simulated ones, nothing for CPU tasks."""
    names = []
    for s in slices:
        gpu = gpus.get(s.gpu_index)
        names.append(str(s.gpu_index) if gpu is None or gpu.simulated else gpu.uuid)
    return ",".join(names)


def _minors(driver: Path) -> dict[str, int]:
    """uuid -> number of its node, which need not be NVML's index."""
    found = {}
    if driver.is_dir():
        for entry in driver.iterdir():
            facts: dict[str, str] = {}
            for line in (entry / "information").read_text().splitlines():
                name, _, value = line.partition(":")
                facts[name.strip()] = value.strip()
            if "GPU UUID" in facts and "Device Minor" in facts:
                found[facts["GPU UUID"]] = int(facts["Device Minor"])
    return found
