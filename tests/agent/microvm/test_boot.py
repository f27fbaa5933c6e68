"""What the kernel starts first: run here for real, with calls that do no harm."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.runtime.microvm.image import build
from gpool.agent.runtime.microvm.image.kernel import NoKernel, needs, unpack_lz4, vmlinux
from gpool.agent.runtime.microvm.image.system import closure, packages
from gpool.agent.runtime.microvm.monitors.firecracker.monitor import Firecracker
from gpool.agent.runtime.microvm.monitors.protocol import GuestDisk, GuestMachine
from gpool.agent.runtime.microvm.monitors.qemu import GUEST_NETWORK, TCG, Qemu
from gpool.agent.runtime.microvm.requirements import PROBE_LINE, probe_archive
from gpool.agent.runtime.protocol import SandboxNetwork

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the program is x86-64's")
BECOMES = build.BootPlan(
    ("/modules/a.ko",),
    "/opt/gpool",
    "/opt/gpool/own",
    (("/x", "/opt/gpool/x"),),
    ("/python", "-I"),
    ("A=b",),
)


@x86
def test_the_program_makes_its_calls_in_order_and_nothing_else(tmp_path: Path) -> None:
    made = tmp_path / "init"
    row = [
        build.BootStep(1, (1, "one ", 4)),
        build.BootStep(1, (1, "two", 3)),
        build.BootStep(build.SYS_EXIT, (7,)),
    ]
    made.write_bytes(build.program(row))
    made.chmod(0o755)
    ran = subprocess.run([made], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (7, b"one two")


@x86
def test_the_program_becomes_another_with_arguments_and_variables(tmp_path: Path) -> None:
    made = tmp_path / "init"
    argv = ("/bin/sh", "-c", 'echo "$0 $1 $GIVEN"', "zero", "one word")
    row = [
        build.BootStep(build.SYS_EXECVE, ("/bin/sh", argv, ("GIVEN=here",))),
        build.BootStep(build.SYS_EXIT, (1,)),
    ]
    made.write_bytes(build.program(row))
    made.chmod(0o755)
    ran = subprocess.run([made], capture_output=True, check=False, env={"NOT": "given"})
    assert (ran.returncode, ran.stdout) == (0, b"zero one word here\n")


def test_the_disks_are_mounted_read_only_before_anything_runs_from_them() -> None:
    row = build.steps(BECOMES)
    mounted = [step.words for step in row if step.number == build.SYS_MOUNT]
    disks = [words for words in mounted if words[2] == "squashfs"]
    assert [words[:2] for words in disks] == [
        ("/dev/vda", "/system"),
        ("/dev/vdb", "/system/opt/gpool"),
        ("/dev/vdc", "/system/opt/gpool/own"),
    ]
    assert all(int(str(words[3])) & build.MS_RDONLY for words in disks)
    assert [step.number for step in row[-2:]] == [build.SYS_EXECVE, build.SYS_EXIT]


def entries(data: bytes) -> dict[str, bytes]:
    """Read the kernel's archive format as its documentation has it."""
    found, at = {}, 0
    while True:
        assert data[at : at + 6] == b"070701"
        words = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        size, length = words[6], words[11]
        name = data[at + 110 : at + 110 + length - 1].decode()
        start = (at + 110 + length + 3) // 4 * 4
        if name == "TRAILER!!!":
            return found
        found[name] = data[start : start + size]
        at = (start + size + 3) // 4 * 4


@given(
    st.dictionaries(
        st.from_regex(r"/modules/[a-z]{1,9}\.ko", fullmatch=True), st.binary(max_size=70)
    )
)
def test_what_goes_into_the_archive_always_comes_out(modules: dict[str, bytes]) -> None:
    found = entries(build.archive(b"init", modules))
    assert found["init"] == b"init"
    assert {f"/{name}": data for name, data in found.items() if name.endswith(".ko")} == modules


def test_the_probe_says_its_line_and_restarts() -> None:
    assert PROBE_LINE.encode() in entries(probe_archive())["init"]


def lz4(parts: list[tuple[bytes, int, int]]) -> tuple[bytes, bytes]:
    """(packed, plain) of (literals, how far back, how long) triples."""
    packed, plain = bytearray(), bytearray()

    def more(count: int) -> bytes:
        return bytes([255] * (count // 255) + [count % 255])

    for literals, back, length in parts:
        back = max(1, min(back, len(plain) + len(literals)))
        packed.append(min(len(literals), 15) << 4 | min(length - 4, 15))
        packed += more(len(literals) - 15) if len(literals) >= 15 else b""
        packed += literals
        plain += literals
        packed += struct.pack("<H", back)
        packed += more(length - 19) if length >= 19 else b""
        for _ in range(length):
            plain.append(plain[-back])
    packed += b"\x10!"
    plain += b"!"
    return bytes(packed), bytes(plain)


@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=300), st.integers(1, 900), st.integers(4, 600))
    )
)
def test_a_packed_kernel_is_always_unpacked_as_it_was(parts: list[tuple[bytes, int, int]]) -> None:
    packed, plain = lz4(parts)
    framed = (
        b"\x02\x21\x4c\x18"
        + struct.pack("<I", len(packed))
        + packed
        + struct.pack("<I", len(plain))
    )
    assert unpack_lz4(framed + bytes(4)) == plain


@pytest.mark.parametrize("data", [b"", b"MZ" + bytes(2000), os.urandom(4096)])
def test_what_is_no_kernel_is_refused(data: bytes) -> None:
    with pytest.raises(NoKernel):
        vmlinux(data)


def test_a_module_names_what_it_needs() -> None:
    assert needs(b"\0license=GPL\0depends=virtio,virtio-ring\0x") == ["virtio", "virtio_ring"]
    assert needs(b"\0depends=\0") == []
    assert needs(b"") == []


STATUS = """Package: base
Status: install ok installed
Essential: yes
Depends: libc (>= 2), awk | mawk

Package: libc
Status: install ok installed
Priority: optional

Package: mawk
Status: install ok installed
Provides: awk

Package: browser
Status: install ok installed
Depends: libc

Package: gone
Status: deinstall ok config-files
Essential: yes
"""


def test_a_guests_system_is_what_is_essential_and_what_that_needs() -> None:
    known = packages(STATUS)
    assert closure(known, []) == ["base", "libc", "mawk"]
    assert closure(known, ["browser", "unknown"]) == ["base", "browser", "libc", "mawk"]


def test_qemu_gets_no_network_no_monitor_and_only_its_disks() -> None:
    machine = GuestMachine(
        "/k",
        "/a",
        ("w=1",),
        (GuestDisk("system", "/s", True), GuestDisk("work", "/w", False)),
        300,
        2,
    )
    argv = Qemu("/usr/bin/qemu", TCG).command(machine, 3).argv
    text = " ".join(argv)
    assert "-nodefaults" in argv
    assert argv[argv.index("-sandbox") + 1].startswith("on,")
    assert not {"-netdev", "-nic", "-net", "-monitor", "-qmp", "-vnc", "-gdb"} & set(argv)
    assert "file=/s,format=raw,if=none,readonly=on" in text
    assert "file=/w,format=raw,if=none,readonly=off" in text
    assert "fd=3" in text


def test_a_guest_with_a_network_gets_qemus_own_stack_and_no_interface_of_the_host() -> None:
    machine = GuestMachine("/k", "/a", (), (), 300, 1, SandboxNetwork((7,), "127.0.0.53"))
    argv = Qemu("/usr/bin/qemu", TCG).command(machine, 3).argv
    (netdev,) = [argv[at + 1] for at, word in enumerate(argv) if word == "-netdev"]
    words = netdev.split(",")
    assert words[0] == "user"
    assert "ipv6=off" in words
    assert not {"hostfwd", "guestfwd", "tftp", "smb"} & {word.partition("=")[0] for word in words}
    assert not {"-nic", "-net", "-monitor", "-qmp"} & set(argv)
    addresses = [GUEST_NETWORK[name] for name in ("address", "gateway", "resolver")]
    (inside,) = [IPv4Network(word[4:]) for word in words if word.startswith("net=")]
    assert all(IPv4Address(address) in inside for address in addresses)
    assert f"dns={GUEST_NETWORK['resolver']}" in words
    assert not Firecracker("/usr/bin/firecracker").has_network
