"""Device nodes and visibility variables of a lease's real GPUs. Simulated GPUs have none."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpool.agent.machine.drm import AMD, DRM_VENDORS, bus_of
from gpool.core.model import Gpu, Slice

CONTROL_NODES = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
SYSTEM = Path("/sys")
SYSTEM_FOLDERS = ("bus/pci", "devices/pci*", "devices/system", "module/nvidia*")
"""Read by CUDA and its libraries: PCI addresses of GPUs, nearby processors and memory, the driver."""
DRM_FOLDERS = (
    *("class/drm", "dev/char", "class/kfd", "devices/virtual/kfd/kfd/topology"),
    *("module/amdgpu", "module/i915", "module/xe"),
)
"""Read by ROCm and Level Zero besides: render nodes by device number, the compute topology, the driver. ROCm skips a GPU of
the topology whose render node is not in the sandbox."""
DRM_NODES = ("/dri/renderD", "/kfd")
RDMA = Path("/dev/infiniband")
RDMA_FOLDERS = ("class/infiniband", "class/infiniband_verbs")
"""Read by libibverbs: links into devices/pci*."""
DRIVER = Path("/proc/driver/nvidia/gpus")
CAPABILITIES = Path("/proc/driver/nvidia-caps/mig-minors")
CAPABILITY_NODES = Path("/dev/nvidia-caps")
CAPABILITY_MODE = stat.S_IFCHR | 0o444
DEVICES = Path("/proc/devices")
LIBRARIES = re.compile(
    r"lib(?:cuda|cudadebugger|nvcuvid|nvidia-(?:ml|ptxjitcompiler|nvvm|gpucomp|opencl|encode|cfg|allocator))\.so\.1"
    r"|libnvidia-(?:nvvm|nvvm70|gpucomp)\.so\.\d+(?:\.\d+)*"
)
CACHE_LINE = re.compile(r"^\s*(\S+) \(libc6,(?:x86-64|AArch64)[^)]*\) => (\S+)$", re.MULTILINE)
LDCONFIG = ("/sbin/ldconfig", "-p")


def device_arguments(
    gpus: Mapping[int, Gpu], slices: Sequence[Slice], others: Sequence[str] = ()
) -> list[str]:
    """`others`: further device nodes."""
    real = [
        gpus[s.gpu_index] for s in slices if s.gpu_index in gpus and not gpus[s.gpu_index].simulated
    ]
    return node_arguments((*device_nodes(real), *others))


def rdma_nodes(folder: Path = RDMA) -> tuple[str, ...]:
    """Character devices of RDMA: uverbs of each card, and the connection manager."""
    if not folder.is_dir():
        return ()
    return tuple(str(node) for node in sorted(folder.iterdir()) if node.is_char_device())


def device_nodes(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    gpus = [gpu for gpu in gpus if gpu.vendor not in DRM_VENDORS]  # those come with a `GpuShare`
    if not gpus:
        return ()
    minors = _minors(DRIVER)
    return (*CONTROL_NODES, *(f"/dev/nvidia{minors.get(gpu.uuid, gpu.index)}" for gpu in gpus))


def node_arguments(nodes: Sequence[str]) -> list[str]:
    if not nodes:
        return []
    words = []
    for node in dict.fromkeys(nodes):
        if os.path.exists(node):
            words += ["--dev-bind", node, node]
    words += ["--tmpfs", str(SYSTEM)]
    is_drm = any(word in node for node in nodes for word in DRM_NODES)
    is_rdma = any(Path(node).parent == RDMA for node in nodes)
    further = (*(DRM_FOLDERS if is_drm else ()), *(RDMA_FOLDERS if is_rdma else ()))
    for folder in (*SYSTEM_FOLDERS, *further):
        for found in sorted(SYSTEM.glob(folder)):
            words += ["--ro-bind", str(found), str(found)]
    return [*words, "--remount-ro", str(SYSTEM)]


def visible_devices(gpus: Mapping[int, Gpu], slices: Sequence[Slice]) -> str:
    """CUDA_VISIBLE_DEVICES: uuids of real NVIDIA GPUs, numbers of simulated ones, "" for CPU tasks."""
    names = []
    for s in slices:
        gpu = gpus.get(s.gpu_index)
        if gpu is not None and gpu.vendor in DRM_VENDORS and not gpu.simulated:
            continue
        names.append(str(s.gpu_index) if gpu is None or gpu.simulated else gpu.uuid)
    return ",".join(names)


def drm_variables(vendor: str, numbers: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """Variables of the AMD or Intel GPUs with these numbers, counted over the cards that the process can open."""
    listed = ",".join(str(number) for number in numbers)
    if vendor != AMD:
        return (("ZE_AFFINITY_MASK", listed), ("ONEAPI_DEVICE_SELECTOR", "level_zero:gpu"))
    renumbered = ",".join(
        str(number) for number in range(len(numbers))
    )  # HIP counts what ROCr shows
    return (
        ("ROCR_VISIBLE_DEVICES", listed),
        ("HIP_VISIBLE_DEVICES", renumbered),
        ("CUDA_VISIBLE_DEVICES", renumbered),  # read by programs for either vendor
    )


def visible_variables(gpus: Mapping[int, Gpu], slices: Sequence[Slice]) -> dict[str, str]:
    """Visibility variables of a process that can open every card of the host."""
    found = {"CUDA_VISIBLE_DEVICES": visible_devices(gpus, slices)}
    leased = {part.gpu_index for part in slices}
    for vendor in sorted(DRM_VENDORS):
        cards = sorted((gpu for gpu in gpus.values() if gpu.vendor == vendor), key=bus_of)
        numbers = [at for at, gpu in enumerate(cards) if gpu.index in leased]
        for name, value in drm_variables(vendor, numbers) if numbers else ():
            found[name] = found.get(name) or value
    return found


def capability_minors(text: str, gpu: int, instance: int, compute: int) -> tuple[int, ...]:
    """From the driver's `mig-minors`; `gpu` is the GPU's device minor."""
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if " " in line)
    place = f"gpu{gpu}/gi{instance}"
    names = (f"{place}/access", f"{place}/ci{compute}/access")
    return tuple(int(found[name]) for name in names if found.get(name, "").isdecimal())


def capability_nodes(gpu: int, instance: int, compute: int) -> tuple[str, ...]:
    made = []
    for minor in capability_minors(CAPABILITIES.read_text(), gpu, instance, compute):
        node = CAPABILITY_NODES / f"nvidia-cap{minor}"
        if not node.exists():
            CAPABILITY_NODES.mkdir(mode=0o755, exist_ok=True)
            os.mknod(node, CAPABILITY_MODE, os.makedev(_major("nvidia-caps"), minor))
            node.chmod(0o444)  # whatever the umask is
        made.append(str(node))
    return tuple(made)


def _major(name: str) -> int:
    for line in DEVICES.read_text().splitlines():
        number, _, word = line.strip().partition(" ")
        if word == name:
            return int(number)
    raise FileNotFoundError(f"/proc/devices lists no device {name!r}: is the NVIDIA driver loaded?")


def _minors(driver: Path) -> dict[str, int]:
    """Return uuid -> minor of the device node, which need not be NVML's index."""
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


def driver_libraries(cache: str) -> dict[str, str]:
    """Return soname -> host path from `ldconfig -p`; the loader takes the first of a name."""
    found: dict[str, str] = {}
    for name, path in CACHE_LINE.findall(cache):
        if LIBRARIES.fullmatch(name):
            found.setdefault(name, path)
    return found
