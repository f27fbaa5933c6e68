"""NVIDIA GPUs of images: named in the engine's CDI specs, or given by device nodes and the driver's libraries.

Docker from 25 on reads CDI specs itself. Podman's Docker interface ignores CDI names without an error (decision 0022), so
gpool applies the specs for it, and for older engines: nodes of the leased GPUs, libraries by soname, variables.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpool.agent.machine.drm import node_groups
from gpool.agent.runtime.devices import LDCONFIG, LIBRARIES, device_nodes, driver_libraries
from gpool.agent.runtime.protocol import GpuShare, PartFailed
from gpool.core.model import Gpu, Slice

DRIVER_AT = "/opt/gpool/driver"
CDI_KIND = "nvidia.com/gpu"
CDI_SUFFIXES = frozenset({".json", ".yaml", ".yml"})
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
CUDA_LIBRARY = "libcuda.so.1"
MOST_BYTES = 8 << 20
_CARD_NODE = re.compile(r"/dev/nvidia\d+")
_VERSIONED = re.compile(r"(lib[\w+.-]+?\.so)(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class GpuMounts:
    """Either `nodes` and `binds`, or `cdi` and `binds`; empty without a real GPU."""

    nodes: tuple[str, ...] = ()
    binds: tuple[tuple[str, str, bool], ...] = ()
    cdi: tuple[str, ...] = ()
    libraries: bool = False  # some binds are the driver's libraries, at `DRIVER_AT`
    variables: tuple[tuple[str, str], ...] = ()
    groups: tuple[int, ...] = ()  # of nodes that are not open to all


@dataclass(frozen=True, slots=True)
class CdiEdits:
    """Changes that a spec makes to a container."""

    nodes: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()  # host paths of mounts
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CdiSpec:
    """NVIDIA's devices of one spec file."""

    common: CdiEdits
    devices: Mapping[str, CdiEdits]

    def name_of(self, uuid: str, nodes: Sequence[str]) -> str:
        """Name of a device: its uuid, or the one whose only card is among `nodes`. Empty: the spec has none."""
        if uuid in self.devices:
            return uuid
        cards = {node for node in nodes if _CARD_NODE.fullmatch(node)}
        if uuid.startswith("MIG-") or len(cards) != 1:
            return ""
        for name, edits in self.devices.items():
            if {node for node in edits.nodes if _CARD_NODE.fullmatch(node)} == cards:
                return name
        return ""


def read_specs(folders: Sequence[str]) -> Iterator[CdiSpec]:
    """NVIDIA's specs of these folders. A file that cannot be read is left out: the engine would ignore it too."""
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
        for file in sorted(Path(folder).glob("*")):
            if file.suffix not in CDI_SUFFIXES:
                continue
            try:
                with file.open("rb") as opened:
                    document = yaml.safe_load(opened.read(MOST_BYTES))  # JSON is YAML
            except (OSError, yaml.YAMLError, ValueError, RecursionError):
                continue
            if isinstance(document, Mapping) and document.get("kind") == CDI_KIND:
                listed = [one for one in _items(document.get("devices")) if "name" in one]
                devices = {str(one["name"]): _edits(one) for one in listed}
                yield CdiSpec(_edits(document), devices)


def _edits(holder: Mapping[str, Any]) -> CdiEdits:
    edits = holder.get("containerEdits")
    if not isinstance(edits, Mapping):
        return CdiEdits()
    nodes = [
        str(one.get("hostPath") or one.get("path")) for one in _items(edits.get("deviceNodes"))
    ]
    files = [str(one["hostPath"]) for one in _items(edits.get("mounts")) if "hostPath" in one]
    words = edits.get("env")
    pairs = [str(word).partition("=") for word in words] if isinstance(words, list) else []
    return CdiEdits(
        frozenset(nodes),
        tuple(files),
        tuple((name, value) for name, equals, value in pairs if equals),
    )


def _items(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def cdi_names(
    specs: Sequence[CdiSpec], uuids: Sequence[str], nodes: Sequence[str]
) -> tuple[str, ...]:
    """Names for the engine if one spec has all devices; else none."""
    for spec in specs:
        names = [spec.name_of(uuid, nodes if len(uuids) == 1 else ()) for uuid in uuids]
        if names and all(names):
            return tuple(f"{CDI_KIND}={name}" for name in names)
    return ()


def spec_libraries(specs: Sequence[CdiSpec], names: Sequence[str]) -> dict[str, str]:
    """Return soname -> host path of the libraries that the specs mount. An engine's hook would make the sonames."""
    found: dict[str, str] = {}
    for spec in specs:
        for edits in (spec.common, *(spec.devices[name] for name in names if name in spec.devices)):
            for path in edits.files:
                base = os.path.basename(path)
                versioned = _VERSIONED.fullmatch(base)
                for soname in (base, f"{versioned[1]}.1" if versioned else ""):
                    if LIBRARIES.fullmatch(soname) and os.path.isfile(path):
                        found.setdefault(soname, path)
    return found


def gpu_mounts(
    gpus: Mapping[int, Gpu],
    slices: Sequence[Slice],
    share: GpuShare | None = None,
    *,
    engine_folders: Sequence[str] = (),
    folders: Sequence[str] = CDI_FOLDERS,
) -> GpuMounts:
    """`engine_folders`: CDI folders that the engine reads itself, none if it does not. Raises `PartFailed`."""
    real = [
        gpus[s.gpu_index] for s in slices if s.gpu_index in gpus and not gpus[s.gpu_index].simulated
    ]
    nodes = device_nodes(real) if share is None else share.nodes
    nodes = tuple(node for node in nodes if os.path.exists(node))
    if not nodes:
        return GpuMounts()
    more = () if share is None else share.binds
    binds = tuple((str(host), inside, True) for inside, host in more)
    uuids = _visible(real, share)
    if not uuids:  # AMD's and Intel's images bring all but the kernel's driver
        return GpuMounts(nodes, binds, groups=node_groups(nodes))
    named = cdi_names(tuple(read_specs(engine_folders)), uuids, nodes)
    if named:
        others = tuple(node for node in nodes if not node.startswith("/dev/nvidia"))
        return GpuMounts(others, binds, named, groups=node_groups(others))
    specs = tuple(read_specs(folders))
    names = [spec.name_of(uuid, nodes) for spec in specs for uuid in uuids]
    cache = subprocess.run(LDCONFIG, capture_output=True, text=True, check=False, env={}).stdout
    libraries = driver_libraries(cache) or spec_libraries(specs, names)
    if CUDA_LIBRARY not in libraries:
        raise PartFailed(
            f"images get no NVIDIA GPU here: {CUDA_LIBRARY} is neither in the loader's cache nor in a CDI spec of "
            f"{' or '.join(folders)}; run: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
        )
    mounted = tuple((path, f"{DRIVER_AT}/{name}", False) for name, path in libraries.items())
    edited = [edits for spec in specs for edits in (spec.common, *_named(spec, names))]
    variables = tuple(pair for edits in edited for pair in edits.variables)
    return GpuMounts(nodes, (*mounted, *binds), (), True, variables, groups=node_groups(nodes))


def group_words(groups: Sequence[int], *, podman: bool, mapped: bool) -> tuple[str, ...]:
    """Groups as the engine takes them. `mapped`: its containers have a user namespace. Raises `PartFailed`."""
    if not groups or not mapped:
        return tuple(str(group) for group in groups)
    if podman:
        return ("keep-groups",)  # those of the user that runs Podman
    raise PartFailed(
        "containers of this engine run in a user namespace, where the group of a GPU's device node does not exist: "
        f"open the node to all (chmod 666; its group is {groups[0]})"
    )


def _named(spec: CdiSpec, names: Sequence[str]) -> list[CdiEdits]:
    return [spec.devices[name] for name in dict.fromkeys(names) if name in spec.devices]


def _visible(real: Sequence[Gpu], share: GpuShare | None) -> tuple[str, ...]:
    """NVIDIA's uuids, of cards or of MIG instances."""
    if share is None:
        return tuple(gpu.uuid for gpu in real if gpu.vendor == "nvidia")
    listed = dict(share.variables).get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(uuid for uuid in listed if uuid.startswith(("GPU-", "MIG-")))
