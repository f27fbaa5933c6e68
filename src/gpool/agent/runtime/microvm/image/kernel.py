"""The guest's kernel: a package of the host with the modules a guest needs. Downloads nothing."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NEEDED = (
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "virtio_rng",
    "squashfs",
    "ext4",
    "vmw_vsock_virtio_transport",
    "virtio_net",
)
OPTIONAL = frozenset({"virtio_rng", "vmw_vsock_virtio_transport", "virtio_net"})
PREFERRED = "-cloud-amd64"
INSTALL = "apt-get install linux-image-cloud-amd64"
HEADER_AT, PAYLOAD_AT = 0x1F1, 0x248
DEPENDS = b"\0depends="
LZ4_LEGACY = b"\x02\x21\x4c\x18"


class NoKernel(Exception):
    """The text says what to install."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """`version` as in `uname -r`; `modules` in load order."""

    version: str
    image: Path
    modules: tuple[Path, ...]


def find_kernel(root: Path = Path("/"), also: Sequence[str] = ()) -> Kernel:
    """Newest kernel with all modules, cloud kernels first, as they boot faster. Raises `NoKernel`.

    `also`: modules that are not loaded at boot, such as a GPU's.
    """
    images = [*root.glob("boot/vmlinuz-*"), *root.glob("usr/lib/modules/*/vmlinuz")]
    reasons = []
    for image in sorted(images, key=_rank, reverse=True):
        version = _version(image)
        folder = root / "lib" / "modules" / version
        try:
            module_files(folder, also)
            return Kernel(version, image, module_files(folder))
        except NoKernel as unfit:
            reasons.append(f"{version}: {unfit}")
    detail = "; ".join(reasons) or f"no vmlinuz beneath {root / 'boot'}"
    raise NoKernel(f"no kernel for a guest ({detail}): {INSTALL}")


def _version(image: Path) -> str:
    return image.parent.name if image.name == "vmlinuz" else image.name.removeprefix("vmlinuz-")


def _rank(image: Path) -> tuple[bool, list[int]]:
    version = _version(image)
    return version.endswith(PREFERRED), [int(word) for word in re.findall(r"\d+", version)]


def module_files(folder: Path, wanted: Sequence[str] = NEEDED) -> tuple[Path, ...]:
    """Files of these modules and of those they need, in load order. Raises `NoKernel`."""
    try:
        built_in = (folder / "modules.builtin").read_text().split()
    except FileNotFoundError as absent:
        raise NoKernel("its modules are not installed") from absent
    within = {_name(path) for path in built_in}
    files = {
        _name(path.name): path
        for part in ("kernel", "extra", "updates")  # the last wins, as for modprobe
        for path in (folder / part).rglob("*.ko*")
    }
    chosen: dict[Path, None] = {}

    def choose(name: str) -> None:
        if name in within:
            return
        file = files.get(name)
        if file is None:
            if name not in OPTIONAL:
                raise NoKernel(f"it has no {name}")
            return
        for needed in needs(read_module(file)):
            choose(needed)
        chosen[file] = None

    for name in wanted:
        choose(name)
    return tuple(chosen)


def needs(module: bytes) -> list[str]:
    at = module.find(DEPENDS)
    if at < 0:
        return []
    words = module[at + len(DEPENDS) : module.index(b"\0", at + 1)].decode("ascii", "replace")
    return [word.replace("-", "_") for word in words.split(",") if word]


def _name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def read_module(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as refused:
        raise NoKernel(f"{file} cannot be read: {refused.strerror}") from refused
    if file.suffix == ".xz":
        return lzma.decompress(data)
    if file.suffix == ".gz":
        return gzip.decompress(data)
    if file.suffix != ".ko":
        raise NoKernel(f"its modules are packed as {file.suffix}, which gpool cannot read")
    return data


def vmlinux(image: bytes) -> bytes:
    """ELF program inside a compressed kernel, for Firecracker. `NoKernel` for an unknown compression."""
    if image[:4] == b"\x7fELF":
        return image
    if image[HEADER_AT + 0x11 : HEADER_AT + 0x15] != b"HdrS":
        raise NoKernel("this is no Linux kernel for x86-64")
    start = ((image[HEADER_AT] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", image, PAYLOAD_AT)
    payload = image[start + offset : start + offset + length]
    if payload[:4] == LZ4_LEGACY:
        unpacked = unpack_lz4(payload)
    elif payload[:2] == b"\x1f\x8b":
        unpacked = gzip.decompress(payload[:-4])
    elif payload[:6] == b"\xfd7zXZ\0" or payload[:3] == b"\x5d\0\0":
        unpacked = lzma.decompress(payload[:-4])
    elif payload[:3] == b"BZh":
        unpacked = bz2.decompress(payload[:-4])
    else:
        raise NoKernel(f"a kernel packed as {payload[:4].hex()} is of an unknown compression")
    if unpacked[:4] != b"\x7fELF":
        raise NoKernel("the payload of this kernel is no ELF program")
    return unpacked


def unpack_lz4(data: bytes) -> bytes:
    """LZ4's legacy frame: blocks of at most 8 MiB, each after its length; the kernel's size follows."""
    out = bytearray()
    at = 4
    while at + 8 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length == 0 or at + length > len(data):
            break
        out += _lz4_block(data[at : at + length])
        at += length
    return bytes(out)


def _lz4_block(block: bytes) -> bytearray:
    out = bytearray()
    at, end = 0, len(block)
    while at < end:
        token = block[at]
        at += 1
        count = token >> 4
        if count == 15:
            more = 255
            while more == 255:
                more = block[at]
                at += 1
                count += more
        out += block[at : at + count]
        at += count
        if at >= end:
            break
        back = block[at] | block[at + 1] << 8
        at += 2
        count = (token & 15) + 4
        if count == 19:
            more = 255
            while more == 255:
                more = block[at]
                at += 1
                count += more
        start = len(out) - back
        if back >= count:
            out += out[start : start + count]
        else:  # an overlapping match repeats its own output
            piece = out[start:]
            out += (piece * (count // back + 1))[:count]
    return out
