"""The engine's form of our filter says the same as the kernel's, call by call; and what a container is asked with."""

from __future__ import annotations

import errno
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.bubblewrap.seccomp import ABSENT, ALLOW, ERRNO, MACHINES, REFUSED
from gpool.agent.runtime.docker.confinement import MASKED, ContainerSpec, profile, request
from gpool.agent.runtime.protocol import SandboxLimits

both = pytest.mark.parametrize("machine", list(MACHINES))
WITH_ARGUMENTS = ("clone", "socket", "socketpair", "ioctl", "personality", "mknod", "mknodat")
WITH_ARGUMENTS += ("setsockopt",)
words = st.one_of(
    st.integers(0, 64),
    st.integers(0, 2**64 - 1),
    st.integers(0, 63).map(lambda bit: 1 << bit),
    st.sampled_from(
        [*seccomp.PERSONALITIES, seccomp.TIOCSTI, seccomp.TIOCLINUX, 0o020600, 0o060600]
    ),
    st.sampled_from([seccomp.TIOCSETD, seccomp.SOL_TCP, seccomp.TCP_ULP, 132, 262]),
    st.sampled_from([1, 2, 10, 16]).map(lambda family: family | 1 << 32),
)
HOLDS = {
    "SCMP_CMP_EQ": lambda held, first, second: held == first,
    "SCMP_CMP_NE": lambda held, first, second: held != first,
    "SCMP_CMP_GT": lambda held, first, second: held > first,
    "SCMP_CMP_MASKED_EQ": lambda held, first, second: held & first == second,
}


def kernels(machine: str, number: int, arguments: list[int]) -> int:
    """What the kernel answers by our own program, step by step."""
    padded = [*arguments, *([0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number, MACHINES[machine].audit, 0, *padded)
    steps = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    at = held = 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == seccomp.LOAD:
            held = struct.unpack_from("<I", data, value)[0]
        elif code == seccomp.AND:
            held &= value
        elif code == seccomp.RETURN:
            return int(value)
        else:
            truths = {
                seccomp.JUMP_EQUAL: held == value,
                seccomp.JUMP_AT_LEAST: held >= value,
                seccomp.JUMP_ANY_BIT: bool(held & value),
            }
            at += yes if truths[code] else no


def engines(machine: str, name: str, arguments: list[int]) -> set[int]:
    """Every answer that one of the engine's rules gives; they are tried in no order."""
    found = set()
    for rule in profile(machine)["syscalls"]:
        if name in rule["names"] and all(
            HOLDS[each["op"]](arguments[each["index"]], each["value"], each["valueTwo"])
            for each in rule["args"]
        ):
            found.add(ERRNO | rule["errnoRet"])
    return found or {ALLOW}


@both
@given(name=st.sampled_from(WITH_ARGUMENTS), arguments=st.lists(words, min_size=6, max_size=6))
def test_calls_whose_arguments_count_are_never_judged_more_mildly_by_the_engine(
    machine: str, name: str, arguments: list[int]
) -> None:
    number = getattr(MACHINES[machine], name)
    if number < 0:
        return
    ours, theirs = kernels(machine, number, arguments), engines(machine, name, arguments)
    if ours != ALLOW:
        assert ALLOW not in theirs
    elif max(arguments) < 2**32:  # past that the kernel reads half of it, the engine all: stricter
        assert theirs == {ALLOW}


@both
@given(
    family=st.integers(0, 20),
    kind=st.integers(0, 20).map(lambda kind: kind | 0o2000000) | st.integers(0, 20),
    protocol=st.integers(0, 30),
)
def test_sockets_are_judged_alike_by_both(
    machine: str, family: int, kind: int, protocol: int
) -> None:
    arguments = [family, kind, protocol, 0, 0, 0]
    ours = kernels(machine, MACHINES[machine].socket, arguments)
    assert (ours == ALLOW) == (engines(machine, "socket", arguments) == {ALLOW})
    if family == seccomp.AF_NETLINK and ours == ALLOW:
        assert (kind & 0xF in (2, 3), protocol) == (True, 0)


@both
def test_what_the_tables_refuse_is_always_refused_by_the_engine_too(machine: str) -> None:
    column = MACHINES[machine].column
    for table, code in ((REFUSED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        for name, numbers in table.items():
            if numbers[column] >= 0:
                assert engines(machine, name, [0] * 6) == {ERRNO | code}
                assert kernels(machine, numbers[column], [0] * 6) == ERRNO | code


@both
def test_ordinary_calls_are_always_allowed_by_the_engine(machine: str) -> None:
    for name in ("read", "execve", "futex", "openat"):
        assert engines(machine, name, [0] * 6) == {ALLOW}


def asked(**changes: Any) -> dict[str, Any]:
    limits = SandboxLimits(cpu_milli=1500, memory_bytes=256 << 20, io_bytes_per_s=1000)
    fields: dict[str, Any] = {
        "image": "sha256:0",
        "argv": ("sh", "-c", "true"),
        "env": (("A", "1"),),
        "user": 2000,
        "limits": limits,
        "binds": (("/host/a:b", "/work", True),),
        "labels": {"x": "y"},
    }
    return request(ContainerSpec(**{**fields, **changes}), "{}")


def test_a_container_is_never_asked_for_with_rights_or_host_paths() -> None:
    body = asked(volumes=("/data", "/work", "/"))
    host = body["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == []
    assert (host["Privileged"], host["ReadonlyRootfs"], host["NetworkMode"]) == (
        False,
        True,
        "none",
    )
    assert "no-new-privileges" in host["SecurityOpt"]
    assert [mount["Source"] for mount in host["Mounts"]] == ["/host/a:b"]
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert (host["CpuQuota"], host["CpuPeriod"]) == (150_000, 100_000)
    assert set(host["Tmpfs"]) == {"/tmp", "/data"}  # an image's volumes are not the host's disk
    assert set(MASKED) <= set(host["MaskedPaths"])
    assert body["User"] == "2000:2000"
    assert "Binds" not in host


def test_a_container_is_pinned_to_the_cpus_near_its_gpus() -> None:
    assert "CpusetCpus" not in asked()["HostConfig"]
    assert asked(cpus=(0, 1, 48))["HostConfig"]["CpusetCpus"] == "0,1,48"


def test_a_disk_rate_is_asked_for_where_the_disk_is_known() -> None:
    assert "BlkioDeviceWriteBps" not in asked()["HostConfig"]
    host = asked(disk_device="/dev/vda")["HostConfig"]
    assert host["BlkioDeviceWriteBps"] == [{"Path": "/dev/vda", "Rate": 1000}]


def test_variables_are_not_shown_when_a_box_is_printed() -> None:
    box = ContainerSpec("i", ("true",), (("KEY", "hunter2"),), 1, SandboxLimits(1, 1), (), {})
    assert "hunter2" not in repr(box)
