"""What a container may do, as the engine's own words. Pure: says nothing of one host but what it is given."""

from __future__ import annotations

import errno
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.protocol import SandboxLimits, SandboxNetwork

Json = dict[str, Any]

ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
LOW_HALF = 0xFFFFFFFF  # what the kernel reads of an `int` argument; a filter compares all 64 bits

# The engines' own lists, and what else of /proc and /sys tells about the host or its other users.
MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/bus",
    "/proc/config.gz",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/modules",
    "/proc/mtrr",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/softirqs",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/block",
    "/sys/firmware",
    "/sys/fs",
    "/sys/hypervisor",
    "/sys/kernel",
    "/sys/module",
    "/sys/power",
)
MASKED_WITHOUT_GPU = ("/sys/bus", "/sys/class", "/sys/dev", "/sys/devices/virtual", "/proc/driver")
READ_ONLY = ("/proc/fs", "/proc/irq", "/proc/sys")
SANDBOX_NAME = "sandbox"
LEAST_TMPFS_BYTES = 1 << 20
WORK_AT, VALUES_AT = "/work", "/values"
JOINS = "container:"  # a network that is another container's; so are its host name and name servers then


def _argument(index: int, op: str, value: int, second: int = 0) -> Json:
    return {"index": index, "op": op, "value": value, "valueTwo": second}


def _bits(index: int, mask: int, value: int) -> Json:
    return _argument(index, "SCMP_CMP_MASKED_EQ", mask, value)


def _rule(names: Sequence[str], code: int, *arguments: Json) -> Json:
    return {
        "names": list(names),
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": code,
        "args": list(arguments),
    }


def _outside(allowed: Sequence[int], most: int) -> Iterator[tuple[str, int]]:
    """Comparisons of which one holds exactly for numbers that are not allowed; `most` is the highest allowed one."""
    for value in range(most):
        if value not in allowed:
            yield "SCMP_CMP_EQ", value
    yield "SCMP_CMP_GT", most


def _personalities() -> Iterator[tuple[int, int]]:
    """(mask, value) pairs of which one holds exactly for personalities that are not allowed.

    Allowed are any mix of the free bits alone, and all bits at once. A word that has some of the other bits but not
    all has, going round them, one that is set before one that is clear; with all of them set, a free one is clear.
    """
    free = [
        1 << bit for bit in range(32) if 1 << bit in seccomp.PERSONALITIES and 1 << bit != LOW_HALF
    ]
    others = [1 << bit for bit in range(32) if 1 << bit not in free]
    for at, bit in enumerate(others):
        following = others[(at + 1) % len(others)]
        yield bit | following, bit
    for bit in free:
        yield others[0] | bit, others[0]


def _interfaces() -> list[Json]:
    """Of netlink, refuses all but the door to interfaces and routes."""
    netlink = _argument(0, "SCMP_CMP_EQ", seccomp.AF_NETLINK)
    allowed = (seccomp.SOCK_RAW, seccomp.SOCK_DGRAM)
    kinds = [kind for kind in range(seccomp.SOCKET_TYPE_MASK + 1) if kind not in allowed]
    rules = [
        _rule(["socket"], errno.EPERM, netlink, _bits(1, seccomp.SOCKET_TYPE_MASK, kind))
        for kind in kinds
    ]
    beyond = _argument(2, "SCMP_CMP_GT", seccomp.NETLINK_ROUTE)
    return [*rules, _rule(["socket"], errno.EPROTONOSUPPORT, netlink, beyond)]


def profile(machine: str = "", *, interfaces: bool = False) -> Json:
    """`seccomp.program` in the words of libseccomp: the same tables, so that the two cannot drift apart."""
    name = machine or platform.machine()
    known = seccomp.MACHINES.get(name)
    if known is None:
        raise LookupError(
            f"no system call filter for {name}; gpool knows {', '.join(ARCHITECTURES)}"
        )
    rules = []
    for table, code in ((seccomp.REFUSED, errno.EPERM), (seccomp.ABSENT, errno.ENOSYS)):
        names = [call for call, numbers in table.items() if numbers[known.column] >= 0]
        rules.append(_rule(sorted(names), code))
    for bit in range(64):
        if seccomp.NAMESPACE_FLAGS >> bit & 1:
            rules.append(_rule(["clone"], errno.EPERM, _bits(0, 1 << bit, 1 << bit)))
    families: tuple[int, ...] = (seccomp.AF_UNIX, seccomp.AF_INET, seccomp.AF_INET6)
    other: tuple[Json, ...] = ()
    if interfaces:
        families = (*families, seccomp.AF_NETLINK)
        other = (_argument(0, "SCMP_CMP_NE", seccomp.AF_NETLINK),)
        rules += _interfaces()
    for op, value in _outside(families, max(families)):
        rules.append(_rule(["socket"], errno.EAFNOSUPPORT, _argument(0, op, value)))
    kinds = (seccomp.SOCK_STREAM, seccomp.SOCK_DGRAM, seccomp.SOCK_SEQPACKET)
    for kind in range(seccomp.SOCKET_TYPE_MASK + 1):
        if kind not in kinds:
            bits = _bits(1, seccomp.SOCKET_TYPE_MASK, kind)
            rules.append(_rule(["socket"], errno.EPERM, *other, bits))
    for op, value in _outside(seccomp.PROTOCOLS, max(seccomp.PROTOCOLS)):
        rules.append(_rule(["socket"], errno.EPROTONOSUPPORT, _argument(2, op, value)))
    for op, value in _outside((seccomp.AF_UNIX,), seccomp.AF_UNIX):
        rules.append(_rule(["socketpair"], errno.EAFNOSUPPORT, _argument(0, op, value)))
    level, option = _bits(1, LOW_HALF, seccomp.SOL_TCP), _bits(2, LOW_HALF, seccomp.TCP_ULP)
    rules.append(_rule(["setsockopt"], errno.EPERM, level, option))
    for request in (seccomp.TIOCSTI, seccomp.TIOCLINUX, seccomp.TIOCSETD):
        rules.append(_rule(["ioctl"], errno.EPERM, _bits(1, LOW_HALF, request)))
    for mask, value in _personalities():
        rules.append(_rule(["personality"], errno.EPERM, _bits(0, mask, value)))
    for kind in (seccomp.CHARACTER_DEVICE, seccomp.BLOCK_DEVICE):
        if known.mknod >= 0:
            bits = _bits(1, seccomp.FILE_TYPE_MASK, kind)
            rules.append(_rule(["mknod"], errno.EPERM, bits))
        bits = _bits(2, seccomp.FILE_TYPE_MASK, kind)
        rules.append(_rule(["mknodat"], errno.EPERM, bits))
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [ARCHITECTURES[name]],
        "syscalls": rules,
    }


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container before it is asked for."""

    image: str  # its id: a name could mean another one by now
    argv: Sequence[str]
    env: Sequence[tuple[str, str]] = field(repr=False)
    user: int  # uid and gid inside
    limits: SandboxLimits
    binds: Sequence[tuple[str, str, bool]]  # (host path, inside, writable)
    labels: Mapping[str, str]
    has_init: bool = True  # the engine's own reaper; otherwise the command is the first process
    takes_input: bool = False
    volumes: Sequence[str] = ()  # what the image declares: unlimited host disk, were they made
    devices: Sequence[str] = ()
    cdi: Sequence[str] = ()  # devices by their names in the engine's own CDI files
    oci_runtime: str = ""  # "": the engine's own choice
    keep_id: bool = False  # a rootless Podman: the agent's uid stays what it is
    user_processes: int = 0  # most processes of that uid; 0: the engine's default
    disk_device: str = ""  # what `io_bytes_per_s` is counted on
    lane: SandboxNetwork | None = None
    network: str = "none"  # in the engine's words


def request(box: ContainerSpec, seccomp_profile: str, *, podman: bool = False) -> Json:
    """The body of the engine's `create`: everything not said here is refused by the engine's defaults.

    `seccomp_profile` is the profile's text for Docker and the path of a file with it for Podman, which also wants
    what is masked among its security options.
    """
    masked = [*MASKED, *(() if box.devices or box.cdi else MASKED_WITHOUT_GPU)]
    options = ["no-new-privileges", f"seccomp={seccomp_profile}"]
    if podman:
        options.append("mask=" + ":".join(masked))
    half = max(LEAST_TMPFS_BYTES, box.limits.memory_bytes // 2)
    small = f"rw,nosuid,nodev,size={half},mode=1777"
    written = {inside for _, inside, _ in box.binds}
    tmpfs = {path: small for path in box.volumes if path not in written and path != "/"}
    host: Json = {
        "AutoRemove": False,
        "CapAdd": [],
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        "CpuPeriod": 100_000,
        "CpuQuota": max(1000, box.limits.cpu_milli * 100),
        "Devices": [
            {"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"}
            for node in box.devices
        ],
        "Init": box.has_init,
        "IpcMode": "private",
        "LogConfig": {"Type": "none", "Config": {}},
        "MaskedPaths": masked,
        "Memory": box.limits.memory_bytes,
        "MemorySwap": box.limits.memory_bytes,
        "Mounts": [
            {
                "Type": "bind",
                "Source": source,
                "Target": inside,
                "ReadOnly": not writable,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for source, inside, writable in box.binds
        ],
        "NetworkMode": box.network,
        "OomScoreAdj": 500,
        "PidsLimit": box.limits.processes,
        "Privileged": False,
        "PublishAllPorts": False,
        "ReadonlyPaths": list(READ_ONLY),
        "ReadonlyRootfs": True,
        "RestartPolicy": {"Name": "no"},
        "SecurityOpt": options,
        "ShmSize": half,
        "Tmpfs": {"/tmp": small, **tmpfs},
        "Ulimits": [
            {"Name": name, "Soft": most, "Hard": most}
            for name, most in (
                ("core", 0),
                ("nofile", box.limits.open_files),
                ("fsize", box.limits.disk_bytes),
                *((("nproc", box.user_processes),) if box.user_processes else ()),
            )
        ],
    }
    joins = box.network.startswith(JOINS)
    if not joins:  # else the host's own servers are written in
        host["Dns"] = [box.lane.resolver if box.lane is not None else "127.0.0.1"]
    if box.cdi:
        host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": list(box.cdi)}]
    if box.oci_runtime:
        host["Runtime"] = box.oci_runtime
    if box.keep_id:
        host["UsernsMode"] = "keep-id"
    if box.limits.io_bytes_per_s is not None and box.disk_device:
        rate = [{"Path": box.disk_device, "Rate": box.limits.io_bytes_per_s}]
        host["BlkioDeviceReadBps"] = host["BlkioDeviceWriteBps"] = rate
    return {
        "AttachStdin": box.takes_input,
        "AttachStdout": True,
        "AttachStderr": True,
        "Cmd": list(box.argv[1:]),
        "Entrypoint": list(box.argv[:1]),
        "Env": [f"{name}={value}" for name, value in box.env],
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
        "Hostname": "" if joins else SANDBOX_NAME,
        "Image": box.image,
        "Labels": dict(box.labels),
        "NetworkDisabled": False,
        "OpenStdin": box.takes_input,
        "StdinOnce": box.takes_input,
        "Tty": False,
        "User": f"{box.user}:{box.user}",
        "WorkingDir": WORK_AT,
    }


def profile_text(machine: str = "", *, interfaces: bool = False) -> str:
    return json.dumps(profile(machine, interfaces=interfaces), separators=(",", ":"))
