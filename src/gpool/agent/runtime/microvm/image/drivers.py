"""The disk of GPU drivers: kernel modules, firmware and libraries of the host, for guests with a passed-through GPU.

A guest's driver must match the libraries, so both are taken from this host. Downloads and builds nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.devices import LDCONFIG, driver_libraries
from gpool.agent.runtime.microvm.image.disks import DiskContents, tree
from gpool.agent.runtime.microvm.image.kernel import (
    Kernel,
    NoKernel,
    find_kernel,
    module_files,
    read_module,
)
from gpool.agent.runtime.protocol import PartFailed


@dataclass(frozen=True, slots=True)
class GuestDriver:
    modules: tuple[str, ...]  # by name, in this order; those they need come before them
    firmware: str = ""  # folder beneath /lib/firmware
    has_libraries: bool = (
        False  # the user's libraries belong to the driver; others come with the environment
    )
    scrubs: bool = False  # the kernel's driver does not clear memory before it is allocated
    nodes: tuple[str, ...] = ()  # patterns beneath /dev; NVIDIA's driver makes none itself
    package: str = ""


DRIVERS: Mapping[str, GuestDriver] = {
    "nvidia": GuestDriver(
        ("nvidia", "nvidia_uvm"),
        "nvidia",
        has_libraries=True,
        scrubs=True,
        package="nvidia-driver with DKMS",
    ),
    "amd": GuestDriver(
        ("amdgpu",),
        "amdgpu",
        nodes=("kfd", "dri/renderD*"),
        package="linux-image-amd64 firmware-amd-graphics",
    ),
    "intel": GuestDriver(
        ("xe",),
        "xe",
        nodes=("dri/renderD*",),
        package="linux-image-amd64 firmware-misc-nonfree",
    ),
}
_VERSION = re.compile(rb"\0version=([0-9][0-9.]*)\0")


@dataclass(frozen=True, slots=True)
class GuestDrivers:
    """A kernel and the disk for it. `modules`: file names on the disk, in load order."""

    kernel: Kernel
    modules: tuple[str, ...]
    disk: DiskContents
    scrubs: bool = False
    nodes: tuple[str, ...] = ()


def ldconfig() -> str:
    return subprocess.run(LDCONFIG, capture_output=True, text=True, check=False, env={}).stdout


def find_drivers(
    vendor: str,
    unpacked: Path,
    *,
    known: Mapping[str, GuestDriver] = DRIVERS,
    root: Path = Path("/"),
    cache: Callable[[], str] = ldconfig,
) -> GuestDrivers:
    """`unpacked`: a folder for modules, which guests load uncompressed. Raises `PartFailed`."""
    driver = known[vendor]
    try:
        kernel = find_kernel(root, driver.modules)
        files = module_files(root / "lib/modules" / kernel.version, driver.modules)
    except NoKernel as absent:
        text = f"no kernel beneath {root / 'boot'} has the module {driver.modules[0]}, which a guest needs for its GPU"
        raise PartFailed(f"{text} ({driver.package}): {absent}") from absent
    contents: dict[str, str] = {}
    names = []
    version = b""
    for file in files:
        name = file.name.partition(".ko")[0] + ".ko"
        data = read_module(file)
        target = unpacked / kernel.version / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != data:
            target.write_bytes(data)
        contents[f"/modules/{name}"] = str(target)
        names.append(name)
        if (found := _VERSION.search(data)) and name == f"{driver.modules[0]}.ko":
            version = found[1]
    if driver.firmware:
        folder = root / "lib/firmware" / driver.firmware
        if vendor == "nvidia" and version:  # the host may keep those of several versions
            folder = folder / version.decode()
        inside = folder.relative_to(root / "lib/firmware")
        contents.update(tree(f"/firmware/{inside}", folder))
    if driver.has_libraries:
        libraries = driver_libraries(cache())
        if "libcuda.so.1" not in libraries:
            raise PartFailed(
                "guests get no NVIDIA GPU here: the loader's cache has no libcuda.so.1"
            )
        for name, path in libraries.items():
            contents[f"/lib/{name}"] = str(Path(path).resolve())
    folders = ("/modules", "/firmware", "/lib")
    disk = DiskContents(contents, folders, written=f"{unpacked}/")
    return GuestDrivers(kernel, tuple(names), disk, driver.scrubs, driver.nodes)
