"""Confinement of a container, as the body of the engine's `create`. Pure."""

from __future__ import annotations

import errno
import json
import platform
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpool.agent.runtime import cgroups
from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.protocol import SandboxLimits, SandboxNetwork

Json = dict[str, Any]

ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
LOW_HALF = 0xFFFFFFFF  # the kernel reads these bits of an `int`; a filter compares all 64

# The engines' own lists, and further files of /proc and /sys that reveal the host or its other users.
MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/bus",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/diskstats",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/locks",
    "/proc/modules",
    "/proc/mtrr",
    "/proc/sched_debug",
    "/proc/schedstat",
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
ULIMITS = {
    resource.RLIMIT_CORE: "core",
    resource.RLIMIT_NOFILE: "nofile",
    resource.RLIMIT_FSIZE: "fsize",
    resource.RLIMIT_MEMLOCK: "memlock",
}
WORK_AT, VALUES_AT = "/work", "/values"
COUNTERS = "/proc/stat"
JOINS = "container:"  # the network, host name and name servers of another container


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
    """Yield comparisons, one of which holds for each number not allowed. `most`: the highest allowed."""
    for value in range(most):
        if value not in allowed:
            yield "SCMP_CMP_EQ", value
    yield "SCMP_CMP_GT", most


def _personalities() -> Iterator[tuple[int, int]]:
    """Yield (mask, value) pairs; one holds for each personality that is not allowed.

    Allowed are any combination of the free bits alone, and all 32 bits set. In any other word, going round the non-free
    bits in a circle, some set bit is followed by a clear one; or all non-free bits are set and a free one is clear.
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
    netlink = _argument(0, "SCMP_CMP_EQ", seccomp.AF_NETLINK)
    allowed = (seccomp.SOCK_RAW, seccomp.SOCK_DGRAM)
    kinds = [kind for kind in range(seccomp.SOCKET_TYPE_MASK + 1) if kind not in allowed]
    rules = [
        _rule(["socket"], errno.EPERM, netlink, _bits(1, seccomp.SOCKET_TYPE_MASK, kind))
        for kind in kinds
    ]
    beyond = _argument(2, "SCMP_CMP_GT", seccomp.NETLINK_ROUTE)
    return [*rules, _rule(["socket"], errno.EPROTONOSUPPORT, netlink, beyond)]


def profile(machine: str = "") -> Json:
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
    families = (seccomp.AF_UNIX, seccomp.AF_INET, seccomp.AF_INET6, seccomp.AF_NETLINK)
    other = _argument(0, "SCMP_CMP_NE", seccomp.AF_NETLINK)
    rules += _interfaces()
    for op, value in _outside(families, max(families)):
        rules.append(_rule(["socket"], errno.EAFNOSUPPORT, _argument(0, op, value)))
    kinds = (seccomp.SOCK_STREAM, seccomp.SOCK_DGRAM, seccomp.SOCK_SEQPACKET)
    for kind in range(seccomp.SOCKET_TYPE_MASK + 1):
        if kind not in kinds:
            bits = _bits(1, seccomp.SOCKET_TYPE_MASK, kind)
            rules.append(_rule(["socket"], errno.EPERM, other, bits))
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
    image: str  # an id: a name could denote another image by now
    argv: Sequence[str]
    env: Sequence[tuple[str, str]] = field(repr=False)
    user: int  # uid and gid inside
    limits: SandboxLimits
    binds: Sequence[tuple[str, str, bool]]  # (host path, inside, writable)
    labels: Mapping[str, str]
    has_init: bool = True  # the engine's init reaps; otherwise the command is the first process
    takes_input: bool = False
    volumes: Sequence[str] = ()  # declared by the image; mounted as tmpfs, not as host disk
    devices: Sequence[str] = ()
    cdi: Sequence[str] = ()  # device names in the engine's CDI files
    groups: Sequence[str] = ()  # further groups, of device nodes that are not open to all
    oci_runtime: str = ""  # "": the engine's default
    keep_id: bool = False  # rootless Podman: the agent's uid is not remapped
    user_processes: int = 0  # process limit of that uid; 0: the engine's default
    disk_device: str = ""  # `io_bytes_per_s` applies to it
    sandbox_network: SandboxNetwork | None = None
    network: str = "none"  # as the engine names it
    cpus: Sequence[int] = ()  # to run on; empty: all


def request(spec: ContainerSpec, seccomp_profile: str, *, podman: bool = False) -> Json:
    """Body of `create`; the engine's defaults refuse everything else.

    `seccomp_profile`: the profile's text for Docker, its path for Podman, which also takes masked paths as an option.
    """
    masked = [*MASKED, *(() if spec.devices or spec.cdi else MASKED_WITHOUT_GPU)]
    options = ["no-new-privileges", f"seccomp={seccomp_profile}"]
    if podman:
        options.append("mask=" + ":".join(masked))
    half = spec.limits.tmpfs_bytes
    small = f"rw,nosuid,nodev,size={half},mode=1777"
    written = {inside for _, inside, _ in spec.binds}
    tmpfs = {path: small for path in spec.volumes if path not in written and path != "/"}
    host: Json = {
        "AutoRemove": False,
        "CapAdd": [],
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        "CpuPeriod": 100_000,
        "CpuQuota": max(1000, spec.limits.cpu_milli * 100),
        "Devices": [
            {"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"}
            for node in spec.devices
        ],
        "GroupAdd": list(spec.groups),
        "Init": spec.has_init,
        "IpcMode": "private",
        "LogConfig": {"Type": "none", "Config": {}},
        "MaskedPaths": masked,
        "Memory": spec.limits.memory_bytes,
        "MemorySwap": spec.limits.memory_bytes,
        "Mounts": [
            {
                "Type": "bind",
                "Source": source,
                "Target": inside,
                "ReadOnly": not writable,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for source, inside, writable in spec.binds
        ],
        "NetworkMode": spec.network,
        "OomScoreAdj": 500,
        "PidsLimit": spec.limits.processes,
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
                *((ULIMITS[kind], most) for kind, most in cgroups.rlimits(spec.limits)),
                *((("nproc", spec.user_processes),) if spec.user_processes else ()),
            )
        ],
    }
    joins = spec.network.startswith(JOINS)
    if not joins:  # Docker refuses it beside another container's network
        host["Dns"] = [
            spec.sandbox_network.resolver if spec.sandbox_network is not None else "127.0.0.1"
        ]
    if spec.cdi:
        host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": list(spec.cdi)}]
    if spec.oci_runtime:
        host["Runtime"] = spec.oci_runtime
    if spec.keep_id:
        host["UsernsMode"] = "keep-id"
    if spec.cpus:
        host["CpusetCpus"] = ",".join(str(cpu) for cpu in spec.cpus)
    if spec.limits.io_bytes_per_s is not None and spec.disk_device:
        rate = [{"Path": spec.disk_device, "Rate": spec.limits.io_bytes_per_s}]
        host["BlkioDeviceReadBps"] = host["BlkioDeviceWriteBps"] = rate
    return {
        "AttachStdin": spec.takes_input,
        "AttachStdout": True,
        "AttachStderr": True,
        "Cmd": list(spec.argv[1:]),
        "Entrypoint": list(spec.argv[:1]),
        "Env": [f"{name}={value}" for name, value in spec.env],
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
        "Hostname": "" if joins else SANDBOX_NAME,
        "Image": spec.image,
        "Labels": dict(spec.labels),
        "NetworkDisabled": False,
        "OpenStdin": spec.takes_input,
        "StdinOnce": spec.takes_input,
        "Tty": False,
        "User": f"{spec.user}:{spec.user}",
        "WorkingDir": WORK_AT,
    }


def profile_text(machine: str = "") -> str:
    return json.dumps(profile(machine), separators=(",", ":"))
