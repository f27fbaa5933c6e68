"""A lease's real GPUs in a container: device nodes and libraries, or CDI names."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.devices import device_nodes
from gpool.agent.runtime.protocol import GpuShare
from gpool.core.model import Gpu, Slice

DRIVER_AT = "/opt/gpool/driver"
LIBRARIES = re.compile(
    r"lib(?:cuda|cudadebugger|nvcuvid|nvidia-(?:ml|ptxjitcompiler|nvvm|gpucomp|opencl|encode|cfg|allocator))\.so\.1"
    r"|libnvidia-(?:nvvm|nvvm70|gpucomp)\.so\.\d+(?:\.\d+)*"
)
CACHE_LINE = re.compile(r"^\s*(\S+) \(libc6,(?:x86-64|AArch64)[^)]*\) => (\S+)$", re.MULTILINE)
CDI_KIND = "nvidia.com/gpu"
CDI_SUFFIXES = (".json", ".yaml", ".yml")
LDCONFIG = ("/sbin/ldconfig", "-p")


@dataclass(frozen=True, slots=True)
class GpuMounts:
    """Either `nodes` and `binds`, or `cdi`; empty without a real GPU."""

    nodes: tuple[str, ...] = ()
    binds: tuple[tuple[str, str, bool], ...] = ()
    cdi: tuple[str, ...] = ()


def driver_libraries(cache: str) -> dict[str, str]:
    """Return soname -> host path from `ldconfig -p`; the loader takes the first of a name."""
    found: dict[str, str] = {}
    for name, path in CACHE_LINE.findall(cache):
        if LIBRARIES.fullmatch(name):
            found.setdefault(name, path)
    return found


def cdi_names(folders: Sequence[str], uuids: Sequence[str]) -> tuple[str, ...]:
    for folder in folders:
        for file in sorted(Path(folder).glob("*")):
            if file.suffix not in CDI_SUFFIXES:
                continue
            text = file.read_text(errors="replace")
            if CDI_KIND in text and all(uuid in text for uuid in uuids):
                return tuple(f"{CDI_KIND}={uuid}" for uuid in uuids)
    return ()


def gpu_mounts(
    gpus: Mapping[int, Gpu],
    slices: Sequence[Slice],
    cdi_folders: Sequence[str],
    share: GpuShare | None = None,
) -> GpuMounts:
    real = [
        gpus[s.gpu_index] for s in slices if s.gpu_index in gpus and not gpus[s.gpu_index].simulated
    ]
    nodes = device_nodes(real) if share is None else share.nodes
    nodes = tuple(node for node in nodes if os.path.exists(node))
    if not nodes:
        return GpuMounts()
    named = () if share is not None else cdi_names(cdi_folders, [gpu.uuid for gpu in real])
    if named:
        return GpuMounts(cdi=named)
    cache = subprocess.run(LDCONFIG, capture_output=True, text=True, check=False, env={}).stdout
    libraries = driver_libraries(cache)
    binds = [(path, f"{DRIVER_AT}/{name}", False) for name, path in libraries.items()]
    more = () if share is None else share.binds
    return GpuMounts(nodes, (*binds, *((str(host), inside, True) for inside, host in more)))
