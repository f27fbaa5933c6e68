"""Attacks on the host's files, secrets, processes and settings."""

from __future__ import annotations

import ctypes
import glob
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator

from trying import Refused, add, answer_s, call, libc, must, opens, planted

FILES, PROCESSES, SETTINGS = "host files", "host processes", "host settings"
AT_FDCWD = -100


def holds(path: str, word: str) -> None:
    with open(path, "rb") as text:
        if word.encode() not in text.read(1 << 20):
            raise Refused("it is another one")


def planted_file(name: str) -> Callable[[], None]:
    return lambda: holds(planted("files").get(name, "/nothing/planted"), planted("secret"))


def others() -> Iterator[str]:
    """Ids of all processes but this one and the one above it."""
    own = {str(os.getpid()), str(os.getppid())}
    yield from (name for name in os.listdir("/proc") if name.isdecimal() and name not in own)


def in_some_process(look: Callable[[str], bool]) -> None:
    for name in others():
        try:
            if look(f"/proc/{name}"):
                return
        except OSError:
            continue
    raise Refused("in no process")


def in_file_of_process(name: str, secret: str) -> Callable[[], None]:
    def look(process: str) -> bool:
        with open(f"{process}/{name}", "rb") as text:
            return str(planted(secret)).encode() in text.read(1 << 22)

    return lambda: in_some_process(look)


def through_root_of_process() -> None:
    wanted = str(planted("files")["key"])
    in_some_process(lambda process: os.path.samestat(os.stat(process + "/root" + wanted), _facts()))


def _facts() -> os.stat_result:
    fields = planted("facts")
    return os.stat_result((0, fields["ino"], fields["dev"], 0, 0, 0, 0, 0, 0, 0))


def through_cwd_of_process() -> None:
    in_some_process(lambda process: planted("marker") in os.listdir(f"{process}/cwd"))


def through_descriptor_of_process() -> None:
    def look(process: str) -> bool:
        for number in os.listdir(f"{process}/fd"):
            if str(planted("files")["open"]) == os.readlink(f"{process}/fd/{number}"):
                holds(f"{process}/fd/{number}", planted("secret"))
                return True
        return False

    in_some_process(look)


def memory_of_process() -> None:
    size = len(planted("secret"))

    def look(process: str) -> bool:
        with open(f"{process}/mem", "rb", buffering=0) as memory:
            memory.seek(planted("address"))
            return memory.read(size) == planted("secret").encode()

    in_some_process(look)


def vm_call(number: int) -> Callable[[], None]:
    """process_vm_readv, and process_vm_writev of the very bytes that lie there."""

    def attack() -> None:
        secret = planted("secret").encode()
        kept = ctypes.create_string_buffer(secret if number == 311 else bytes(len(secret)))
        here = struct.pack("QQ", ctypes.addressof(kept), len(secret))
        there = struct.pack("QQ", planted("address"), len(secret))
        must(number, planted("pid"), here, 1, there, 1, 0)
        if kept.value != secret:
            raise Refused("another's memory")

    return attack


def seize() -> None:
    ctypes.set_errno(0)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(0x4206, planted("pid"), 0, 0) != 0:
        raise Refused(ctypes.get_errno(), "ptrace")


def descriptor_of_process() -> None:
    pidfd = must(434, planted("pid"), 0)
    taken = must(438, pidfd, planted("descriptor"), 0)
    if planted("secret").encode() not in os.pread(taken, 4096, 0):
        raise Refused("another file")


def enter(kind: str) -> Callable[[], None]:
    def attack() -> None:
        held = os.open(f"/proc/{planted('pid')}/ns/{kind}", os.O_RDONLY)
        must(308, held, 0)

    return attack


def inherited_descriptor() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if planted("secret").encode() in os.pread(int(name), 4096, 0):
                return
        except OSError:
            continue
    raise Refused("none")


def descriptor_as_way_out() -> None:
    """CVE-2024-21626: a directory of the host's left open, and `..` from there."""
    for number in range(64):
        for above in ("", "/..", "/../..", "/../../..", "/../../../.."):
            try:
                if planted("marker") in os.listdir(f"/proc/self/fd/{number}{above}"):
                    return
            except OSError:
                continue
    raise Refused("none")


def link_to_host_file() -> None:
    os.link(planted("files")["key"], f"linked-{os.getpid()}")
    os.unlink(f"linked-{os.getpid()}")


def by_handle() -> None:
    """The "shocker": a file by its number on the disk the work directory lies on."""
    here = os.open(".", os.O_RDONLY)
    handle = struct.pack("IiII", 8, 1, 2, 0)
    call(304, here, handle, os.O_RDONLY)


def unix_socket(name: str) -> Callable[[], None]:
    def attack() -> None:
        with socket.socket(socket.AF_UNIX) as dialling:
            dialling.settimeout(answer_s())
            dialling.connect(planted(name))

    return attack


def any_engine_socket() -> None:
    places = ["/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock"]
    places += ["/run/containerd/containerd.sock", "/run/crio/crio.sock", planted("engine")]
    for place in places:
        try:
            with socket.socket(socket.AF_UNIX) as dialling:
                dialling.settimeout(answer_s())
                dialling.connect(place)
                return
        except OSError:
            continue
    raise Refused("none")


def shared_segment() -> None:
    number = must(29, planted("segment"), 0, 0)
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(number, None, 0o10000)
    if at in (None, ctypes.c_void_p(-1).value) or planted(
        "secret"
    ).encode() not in ctypes.string_at(at, 64):
        raise Refused("not ours")


def search_keyring(ring: int) -> Callable[[], None]:
    def attack() -> None:
        key = must(250, 10, ring, b"user\0", str(planted("key name")).encode() + b"\0", 0)
        into = ctypes.create_string_buffer(256)
        must(250, 11, key, into, 255)
        if planted("secret").encode() not in into.raw:
            raise Refused("another key")

    return attack


def write_any(*patterns: str) -> Callable[[], None]:
    def attack() -> None:
        reason: OSError = Refused("there is none")
        for pattern in patterns:
            for path in glob.glob(pattern):
                try:
                    os.close(os.open(path, os.O_WRONLY))
                    return
                except OSError as refused:
                    reason = refused
        raise reason

    return attack


def own_group_limits() -> None:
    for line in open("/proc/self/cgroup"):  # noqa: SIM115 - a child that ends at once
        _, kinds, path = line.rstrip("\n").split(":", 2)
        for top in (f"/sys/fs/cgroup/{kinds}", "/sys/fs/cgroup"):
            for name in (
                "memory.limit_in_bytes",
                "memory.max",
                "pids.max",
                "cgroup.procs",
                "cpu.max",
            ):
                try:
                    os.close(os.open(f"{top}{path}/{name}", os.O_WRONLY))
                    return
                except OSError:
                    continue
    raise Refused("none is in reach")


def real_addresses() -> None:
    with open("/proc/kallsyms") as symbols:
        if not any(int(line.split()[0], 16) for line in symbols):
            raise Refused("all are zero")


def real_kernel_memory() -> None:
    with open("/proc/kcore", "rb") as core:
        if core.read(4) != b"\x7fELF":
            raise Refused("it is empty")


def lists(path: str) -> Callable[[], None]:
    def attack() -> None:
        if not os.listdir(path):
            raise Refused("it is empty")

    return attack


def block_device() -> None:
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(folder, name)
            if stat.S_ISBLK(os.lstat(path).st_mode):
                os.close(os.open(path, os.O_RDONLY))
                return
    raise Refused("there is none")


def node(kind: int, numbers: tuple[int, int], *, opened: bool = False) -> Callable[[], None]:
    def attack() -> None:
        name = f"node-{os.getpid()}"
        os.mknod(name, kind | 0o600, os.makedev(*numbers))
        try:
            if opened:
                os.close(os.open(name, os.O_RDONLY))
        finally:
            os.unlink(name)

    return attack


def on_own_file(act: Callable[[str], object]) -> Callable[[], None]:
    def attack() -> None:
        name = f"own-{os.getpid()}"
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))
        try:
            act(name)
        finally:
            os.unlink(name)

    return attack


def unfiltered() -> None:
    """Another process that has more rights to call the kernel than we, and that we may write to."""
    own = filters("/proc/self")

    def look(process: str) -> bool:
        if filters(process) >= own and own:
            return False
        os.close(os.open(f"{process}/mem", os.O_RDWR))
        return True

    in_some_process(look)


def filters(process: str) -> int:
    with open(f"{process}/status") as status:
        return next(
            (int(line.split()[1]) for line in status if line.startswith("Seccomp_filters:")), 0
        )


def any_capability() -> None:
    with open("/proc/self/status") as status:
        words = [
            line.split()[1]
            for line in status
            if line.startswith(("CapEff", "CapPrm", "CapInh", "CapAmb"))
        ]
    if not any(int(word, 16) for word in words):
        raise Refused("none")


def too_many_descriptors() -> None:
    """Beyond the first three and what the probe itself opened, which are pipes."""
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.fstat(int(name)).st_mode
        except OSError:
            continue  # the listing itself
        if int(name) > 2 and not stat.S_ISFIFO(kind):
            return
    raise Refused("none")


CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 21, 0, 0, 0)

add(FILES, "list root's home", lambda: planted("in root's home") in os.listdir("/root") or _no())
add(FILES, "read an ssh key", planted_file("ssh"))
add(FILES, "read cloud credentials", planted_file("cloud"))
add(FILES, "read the node's key", planted_file("key"))
add(FILES, "read the agent's settings", planted_file("settings"))
add(FILES, "read the agent's lease", planted_file("lease"))
add(FILES, "read another task's file", planted_file("neighbour"))
add(FILES, "read the shadow file", lambda: holds("/etc/shadow", "root:"))
add(FILES, "read the host's /tmp", planted_file("tmp"))
add(FILES, "read the host's shared memory", planted_file("shm"))
add(FILES, "read the host's /run", planted_file("run"))
add(FILES, "read the host's /var", planted_file("var"))
add(FILES, "link to a host file", link_to_host_file)
add(FILES, "open a file by its handle", by_handle, of_kernel=True)
add(FILES, "use an inherited descriptor", inherited_descriptor)
add(FILES, "leave by an open directory", descriptor_as_way_out)
add(FILES, "write a system program", opens("/usr/bin/env", os.O_WRONLY))
add(FILES, "write the interpreter's library", lambda: opens(os.__file__, os.O_WRONLY)())
add(FILES, "write the account file", opens("/etc/passwd", os.O_WRONLY))
add(FILES, "reach a container engine", any_engine_socket)
add(FILES, "reach a unix socket", unix_socket("socket"))
add(FILES, "read a shared memory segment", shared_segment)
add(FILES, "search the session keyring", search_keyring(-3))
add(FILES, "search the user keyring", search_keyring(-4))
add(FILES, "give a file to root", on_own_file(lambda name: os.chown(name, 0, 0)))
add(
    FILES,
    "give a file capabilities",
    on_own_file(lambda name: os.setxattr(name, "security.capability", CAPABILITY)),
)
add(
    FILES, "set a trusted attribute", on_own_file(lambda name: os.setxattr(name, "trusted.x", b"x"))
)

add(PROCESSES, "steer a process without a filter", unfiltered)
add(PROCESSES, "have a right", any_capability, of_kernel=True)
add(PROCESSES, "have a descriptor too many", too_many_descriptors)
add(PROCESSES, "read the agent's environment", in_file_of_process("environ", "in environment"))
add(PROCESSES, "read the agent's command line", in_file_of_process("cmdline", "in command line"))
add(PROCESSES, "read the agent's map", in_file_of_process("maps", "mapped"))
add(PROCESSES, "see through the agent's root", through_root_of_process)
add(PROCESSES, "see through the agent's cwd", through_cwd_of_process)
add(PROCESSES, "read the agent's open file", through_descriptor_of_process)
add(PROCESSES, "read the agent's memory", memory_of_process)
add(PROCESSES, "process_vm_readv the agent", vm_call(310))
add(PROCESSES, "process_vm_writev the agent", vm_call(311))
add(PROCESSES, "trace the agent", seize)
add(PROCESSES, "take the agent's descriptor", descriptor_of_process)
add(PROCESSES, "signal the agent", lambda: os.kill(planted("pid"), 0))
add(
    PROCESSES,
    "signal the agent by pidfd",
    lambda: must(424, must(434, planted("pid"), 0), 0, None, 0),
)
add(
    PROCESSES,
    "limit the agent",
    lambda: must(302, planted("pid"), 7, None, ctypes.create_string_buffer(16)),
)
add(PROCESSES, "compare with the agent", lambda: must(312, planted("pid"), os.getpid(), 1, 0, 0))
add(PROCESSES, "move the agent's pages", lambda: must(279, planted("pid"), 0, None, None, None, 0))
add(
    PROCESSES,
    "make the agent die first",
    lambda: opens(f"/proc/{planted('pid')}/oom_score_adj", os.O_WRONLY)(),
)
for each in ("mnt", "net", "ipc", "uts", "pid"):
    add(PROCESSES, f"enter the agent's {each} namespace", enter(each))

for name, path in {
    "core_pattern": "/proc/sys/kernel/core_pattern",
    "modprobe": "/proc/sys/kernel/modprobe",
    "sysrq-trigger": "/proc/sysrq-trigger",
    "uevent_helper": "/sys/kernel/uevent_helper",
    "hostname": "/proc/sys/kernel/hostname",
    "drop_caches": "/proc/sys/vm/drop_caches",
    "ip_forward": "/proc/sys/net/ipv4/ip_forward",
    "the kernel log": "/dev/kmsg",
    "overcommit": "/proc/sys/vm/overcommit_memory",
    "the user namespaces' limit": "/proc/sys/user/max_user_namespaces",
}.items():
    add(SETTINGS, f"write {name}", opens(path, os.O_WRONLY), of_kernel=True)
add(
    SETTINGS,
    "write a release agent",
    write_any("/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/*/release_agent"),
)
add(
    SETTINGS,
    "join the root control group",
    write_any("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/*/cgroup.procs"),
)
add(SETTINGS, "write its own limits", own_group_limits)
add(
    SETTINGS,
    "register a binary format",
    write_any("/proc/sys/fs/binfmt_misc/register"),
    of_kernel=True,
)
add(SETTINGS, "lower its own badness", lambda: _badness(), of_kernel=True)
add(SETTINGS, "read the kernel's addresses", real_addresses, of_kernel=True)
add(SETTINGS, "read the kernel's memory", real_kernel_memory, of_kernel=True)
add(SETTINGS, "list the kernel's keys", lambda: _not_empty("/proc/keys"), of_kernel=True)
add(SETTINGS, "list the timers", lambda: _not_empty("/proc/timer_list"), of_kernel=True)
add(SETTINGS, "watch the interrupts", lambda: _not_empty("/proc/interrupts"), of_kernel=True)
add(SETTINGS, "watch the soft interrupts", lambda: _not_empty("/proc/softirqs"), of_kernel=True)
add(SETTINGS, "watch the counters of interrupts", lambda: _counts_interrupts(), of_kernel=True)
add(SETTINGS, "read how the host was booted", lambda: _not_empty("/proc/cmdline"), of_kernel=True)
add(SETTINGS, "list the host's locks", lambda: _not_empty("/proc/locks"), of_kernel=True)
add(SETTINGS, "list the kernel's tuning", lists("/sys/kernel"))
add(SETTINGS, "list the host's disks", lists("/sys/block"))
add(SETTINGS, "list the kernel's modules", lists("/sys/module"))
add(SETTINGS, "read a host disk", block_device)
for name, path in {
    "physical memory": "/dev/mem",
    "the ports": "/dev/port",
    "kvm": "/dev/kvm",
    "fuse": "/dev/fuse",
    "a loop device": "/dev/loop-control",
    "tun": "/dev/net/tun",
    "the console": "/dev/tty0",
    "the watchdog's neighbour": "/dev/nvram",
    "vhost": "/dev/vhost-net",
}.items():
    add(SETTINGS, f"open {name}", opens(path, os.O_RDWR), of_kernel=True)
add(SETTINGS, "make a character device", node(stat.S_IFCHR, (1, 3)), of_kernel=True)
add(SETTINGS, "make a block device", node(stat.S_IFBLK, (7, 0)), of_kernel=True)
add(SETTINGS, "make and open a device", node(stat.S_IFCHR, (1, 11), opened=True), of_kernel=True)


def _no() -> None:
    raise Refused("it is another one")


def _not_empty(path: str) -> None:
    with open(path, "rb") as text:
        if not text.read(16):
            raise Refused("it is empty")


def _counts_interrupts() -> None:
    with open("/proc/stat") as text:
        counted = next(line for line in text if line.startswith("softirq "))
    if not any(int(number) for number in counted.split()[1:]):
        raise Refused("they stand still")


def _badness() -> None:
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("-1000")
