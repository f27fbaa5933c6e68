"""Gangs on a site of the test's own: one case a run, as a script, in fresh namespaces. Prints JSON.

gang_stage.py root|rootless|weak CASE
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

from gpool.agent.network.gang.member_filter import mac_of
from gpool.agent.network.policy import Gang
from gpool.core.gangs import address_of
from tests.agent.network.gang_site import (
    GATEWAY,
    METADATA,
    PORT,
    PUBLIC,
    Host,
    build_site,
    eavesdrop,
    overheard,
    peers,
)
from tests.hostile import reaching
from tests.hostile.lanes_world import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    MS_REC,
    MS_SLAVE,
    libc,
    must,
    open_the_way,
    open_tun,
)

SECRET, OTHER = "5a" * 32, "a5" * 32
BIG = 24 << 20
BURST, BREATH_S = 500, 0.02
PATIENCE_S = 240.0  # for what must come about; it ends as soon as it has
NOBODY_THERE = "nobody's rank"
WIREGUARD_DATA = 4  # first byte of a message with a packet
SANDBOXED = """
import fcntl, json, os, socket, struct
found = {}
def tried(name, work):
    try:
        work()
        found[name] = "it could"
    except OSError as refused:
        found[name] = type(refused).__name__
def tun():
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"gang0", 0x1001))
tried("an interface", tun)
tried("raw packets", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255))
tried("packets below IP", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
tried("another address", lambda: socket.socket().bind(("10.211.0.9", 80)))
with socket.create_connection(("rank1", 5000), 240) as stream:
    stream.sendall(b"hello")
    stream.shutdown(socket.SHUT_WR)
    found["its peer"] = len(stream.recv(32, socket.MSG_WAITALL))
print(json.dumps(found))
"""


LISTED = """
import json, socket
seen = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
routes = [line.split()[0] for line in open("/proc/net/route").readlines()[1:]]
print(json.dumps([sorted(seen), routes, socket.gethostname()]))
"""


def inside(rank: int) -> str:
    return str(address_of(rank))


def open_gang(hosts: list[Host], lane: str = "g", secret: str = SECRET, port: int = PORT) -> None:
    for rank, host in enumerate(hosts):
        host.call("open", lane, rank, peers(len(hosts), port), secret)


def talk(hosts: list[Host], _: str) -> dict[str, Any]:
    """Everybody with everybody, by any port, small and large."""
    open_gang(hosts)
    for host in hosts:
        host.call("serve", "g", 5000, 29500, 65535)
    told: dict[str, Any] = {}
    for one, other in permutations(range(len(hosts)), 2):
        ask = hosts[one].call
        told[f"{one} to {other}"] = [
            ask("inside", "g", "send", inside(other), 5000, 10),
            ask("inside", "g", "send", inside(other), 65535, BIG),
            ask("inside", "g", "ask", inside(other), 29500, 1),
            ask("inside", "g", "ask", inside(other), 5000, 65000),
        ]
    told["names"] = [hosts[0].call("inside", "g", "name", f"rank{n}") for n in range(4)]
    told["refused"] = [host.call("refused") for host in hosts]
    told["left"] = [host.call("finish") for host in hosts]
    return told


def forbidden(hosts: list[Host], _: str) -> dict[str, Any]:
    """What a member must not reach: with another gang on the same hosts, whose addresses are the same."""
    open_gang(hosts)
    open_gang(hosts, "other", OTHER, PORT + 100)
    hosts[1].call("serve", "g", 8080)
    targets = forbidden_targets(hosts)
    told: dict[str, Any] = {
        "from the host": from_the_host(hosts),
        "from the lane": hosts[0].call("inside", "g", "reach", targets),
        "its own peer": hosts[0].call("inside", "g", "send", inside(1), 8080, 10),
        "the other gang's": hosts[0].call("inside", "other", "send", inside(1), 8080, 10),
        "strays": hosts[0].call("refused") > 0,
        "multicast": hosts[0].call("inside", "g", "reach", {"all": "224.0.0.251"}),
    }
    told["interfaces"] = hosts[0].call("inside", "g", "interfaces")
    told["sandboxed"] = json.loads(sandboxed(hosts))
    told["left"] = [host.call("finish") for host in hosts]
    return told


def forbidden_targets(hosts: list[Host]) -> dict[str, str]:
    return {
        "its host": hosts[0].address,
        "another host": hosts[1].address,
        "the gateway": GATEWAY,
        "public": PUBLIC,
        "metadata": METADATA,
        NOBODY_THERE: inside(7),
    }


def from_the_host(hosts: list[Host]) -> dict[str, list[str]]:
    """The control: all answer there that can."""
    targets = forbidden_targets(hosts)
    targets.pop(NOBODY_THERE)
    found: dict[str, list[str]] = hosts[0].call("inside", None, "reach", targets, PATIENCE_S)
    return {name: sorted(how) for name, how in found.items()}


def contained(hosts: list[Host], kind: str) -> dict[str, Any]:
    """The same from a container of an engine's that runs outside of all this; with another gang on the same hosts."""
    open_gang(hosts)
    open_gang(hosts, "other", OTHER, PORT + 100)
    hosts[1].call("serve", "g", 5000)
    order = json.dumps({"targets": forbidden_targets(hosts)})
    probe = Path(reaching.__file__).read_text()
    told: dict[str, Any] = {
        "from the host": from_the_host(hosts),
        "sandboxed": json.loads(hosts[0].call("sandbox", "g", SANDBOXED, kind)),
        "from the container": json.loads(hosts[0].call("sandbox", "g", probe, kind, order)),
        "listed": json.loads(hosts[0].call("sandbox", "g", LISTED, kind)),
        "the other gang's": hosts[0].call("sandbox", "other", SANDBOXED, kind),
    }
    told["left"] = [host.call("finish") for host in hosts]
    return told


def in_docker(hosts: list[Host], _: str) -> dict[str, Any]:
    return contained(hosts, "docker")


def in_podman(hosts: list[Host], _: str) -> dict[str, Any]:
    return contained(hosts, "podman")


def sandboxed(hosts: list[Host]) -> str:
    hosts[1].call("serve", "g", 5000)
    return str(hosts[0].call("sandbox", "g", SANDBOXED))


def egress(hosts: list[Host], _: str) -> dict[str, Any]:
    for rank, host in enumerate(hosts):
        host.call("open", "g", rank, peers(len(hosts)), SECRET, True)
    hosts[1].call("serve", "g", 5000)
    targets = {"its host": hosts[0].address, "gateway": GATEWAY, "metadata": METADATA}
    told: dict[str, Any] = {
        "peer": hosts[0].call("inside", "g", "send", inside(1), 5000, 1 << 20),
        "public": hosts[0].call("inside", "g", "reach", {"it": PUBLIC}, PATIENCE_S)["it"],
        "others": hosts[0].call("inside", "g", "reach", targets),
    }
    told["left"] = [host.call("finish") for host in hosts]
    return told


def impostor(hosts: list[Host], mode: str) -> dict[str, Any]:
    """The second host claims to be rank 1 of the first one's gang, without and with its secret."""
    told: dict[str, Any] = {}
    for word, secret, patience_s in (("wrong", OTHER, 3), ("right", SECRET, PATIENCE_S)):
        hosts[0].call("open", "g", 0, peers(2), SECRET)
        hosts[0].call("serve", "g", 5000)
        hosts[1].call("open", "g", 1, peers(2), secret)
        found = hosts[1].call("inside", "g", "send", inside(0), 5000, 10, patience_s)
        told[word] = [
            found,
            counted(hosts[:1], [0], 1 if (mode, word) == ("root", "wrong") else 0)[0] > 0,
        ]
        for host in hosts:
            host.call("close", "g")
    return told


def counted(hosts: list[Host], before: list[int], expected: int) -> list[int]:
    """What they have refused since, once it is so much together: what was sent may still be on its way."""
    end = time.monotonic() + PATIENCE_S
    while True:
        found = [host.call("refused") - was for host, was in zip(hosts, before, strict=True)]
        if sum(found) >= expected or time.monotonic() > end:
            return found
        select.select([], [], [], 0.02)


def outsider(hosts: list[Host], mode: str) -> dict[str, Any]:
    """Somebody on the site hears all that two members say, and says it again: as it was, changed, to the wrong one."""
    open_gang(hosts)
    for host in hosts:
        host.call("watch", "g")
    ear = eavesdrop(1)
    hosts[0].call("inside", "g", "tell", inside(1), 5000, ["first"])
    told: dict[str, Any] = {"first": heard(hosts[1], "first")}
    overheard(ear, hosts[1].address)
    hosts[0].call("inside", "g", "tell", inside(1), 5000, ["true words"])
    told["said"] = heard(hosts[1], "true words")
    said = overheard(ear, hosts[1].address)
    told["overheard"] = len(said)
    told["in the open"] = any(b"true words" in datagram for datagram in said)
    before = [host.call("refused") for host in hosts]
    if mode == "wireguard":
        datagram = max((one for one in said if one[0] == WIREGUARD_DATA), key=len)
    else:
        (datagram,) = (one for one in said if one[0] < 0x80)
    changed = bytearray(datagram)
    changed[-17] ^= 1  # the last letter
    back = b"\0\1" + datagram[2:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaking:
        for whom, words in (
            (hosts[1], datagram),
            (hosts[1], bytes(changed)),
            (hosts[1], os.urandom(200)),
            (hosts[1], b"\0\0" + os.urandom(200)),
            (hosts[0], datagram),
            (hosts[0], back),
        ):
            speaking.sendto(words, (whom.address, PORT))
    if mode == "root":
        counted(hosts, before, 6)  # by then all of it is decided
    hosts[0].call("inside", "g", "tell", inside(1), 5000, ["last"])
    hosts[1].call("inside", "g", "tell", inside(0), 5000, ["last"])
    said_again = ["true words", "true wordr"] if mode == "weak" else []
    told["then came"] = [
        heard(hosts[1], *said_again, "last"),
        heard(hosts[0], *said_again[:1], "last"),
    ]
    told["refused"] = counted(hosts, before, 0)
    return told


def spoofs(hosts: list[Host], _: str) -> dict[str, Any]:
    """A member of another gang on the same hosts sends raw frames, with rights that no task has and knowing all addresses."""
    open_gang(hosts)
    open_gang(hosts, "other", OTHER, PORT + 100)
    hosts[1].call("listen", "g", 5000)
    hosts[1].call("listen", "other", 5000)
    victim, attacker = (Gang(0, (("", 0),) * 2, bytes.fromhex(s)) for s in (SECRET, OTHER))
    frames = {
        "as its member": frame(mac_of(victim, 1), mac_of(victim, 0), inside(0), inside(1), b"1"),
        "from its own": frame(mac_of(victim, 1), mac_of(attacker, 0), inside(0), inside(1), b"2"),
        "another source": frame(mac_of(attacker, 1), mac_of(attacker, 0), inside(5), inside(1), b"3"),
        "another target": frame(mac_of(attacker, 1), mac_of(attacker, 0), inside(0), hosts[1].address, b"4"),
        "to all": frame(b"\xff" * 6, mac_of(attacker, 0), inside(0), inside(1), b"5"),
        "who has": b"\xff" * 6 + mac_of(attacker, 0) + bytes.fromhex("0806000108000604000100") + bytes(23),
        "IPv6": mac_of(attacker, 1) + mac_of(attacker, 0) + b"\x86\xdd" + b"\x60" + bytes(47),
    }  # fmt: skip
    told: dict[str, Any] = {"filtered": {}, "sent": len(frames)}
    before = hosts[0].call("refused")
    for name, each in frames.items():
        told["filtered"][name] = hosts[0].call("frames", "other", each.hex())
    told["refused"] = counted(hosts[:1], [before], len(frames))[0]
    told["came"] = said_last(hosts)
    # somebody on the link who knows the victim's address, not its peer's
    outside = frame(mac_of(victim, 1), b"\x02" + bytes(5), inside(0), inside(1), b"6")
    before = hosts[1].call("refused")
    send_on_bridge(outside)
    told["from the link"] = counted(hosts[1:], [before], 1)
    told["came later"] = said_last(hosts)
    for host, lane in ((hosts[0], "other"), (hosts[1], "g")):
        host.call("unfiltered", lane)
    hosts[0].call("frames", "other", frames["as its member"].hex(), frames["from its own"].hex())
    send_on_bridge(outside)
    told["without filters"] = sorted(words(hosts[1], "g", "1", "2", "6"))
    return told


def frame(to: bytes, sender: bytes, source: str, target: str, body: bytes) -> bytes:
    """An Ethernet frame with a UDP datagram to port 5000, without a UDP checksum."""
    ends = socket.inet_aton(source) + socket.inet_aton(target)
    head = struct.pack(">BBHHHBBH", 0x45, 0, 28 + len(body), 0, 0, 64, 17, 0) + ends
    total = sum(struct.unpack(">10H", head))
    check = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    head = head[:10] + struct.pack(">H", check) + head[12:]
    udp = struct.pack(">HHHH", 5000, 5000, 8 + len(body), 0) + body
    return to + sender + b"\x08\0" + head + udp


def send_on_bridge(data: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as speaking:
        speaking.bind(("br0", 0))
        speaking.send(data)


def said_last(hosts: list[Host]) -> list[list[str]]:
    """All datagrams that came to rank 1 of both gangs up to a true one from rank 0."""
    for lane in ("g", "other"):
        hosts[0].call("inside", lane, "tell", inside(1), 5000, ["last"])
    return [words(hosts[1], lane, "last") for lane in ("g", "other")]


def words(host: Host, lane: str, *until: str) -> list[str]:
    found: list[str] = []
    end = time.monotonic() + PATIENCE_S
    while not set(until) <= set(found) and time.monotonic() < end:
        select.select([], [], [], 0.02)
        found += host.call("words", lane)
    return found


def heard(host: Host, *until: str) -> list[str]:
    found: list[str] = []
    end = time.monotonic() + PATIENCE_S
    while not set(until) <= set(found) and time.monotonic() < end:
        select.select([], [], [], 0.02)
        found += host.call("came", "g")
    return found


def together(hosts: list[Host], _: str) -> dict[str, Any]:
    """Two members on one host, as two agents with ports of their own would have them."""
    host = hosts[0]
    whom = [(host.address, PORT), (host.address, PORT + 1)]
    for rank, lane in enumerate(("one", "other")):
        host.call("open", lane, rank, whom, SECRET)
    host.call("serve", "one", 5000)
    told: dict[str, Any] = {
        "tcp": host.call("inside", "other", "send", inside(0), 5000, BIG),
        "udp": host.call("inside", "other", "ask", inside(0), 5000, 65000),
    }
    try:
        host.call("open", "third", 0, whom, SECRET)
    except RuntimeError as refused:
        told["a port that is taken"] = str(refused)
    told["left"] = [each.call("finish") for each in hosts]
    return told


def flood(hosts: list[Host], mode: str) -> dict[str, Any]:
    """Noise in a member's name while two members talk: in bursts, or else it would be a matter of who gets the processor."""
    open_gang(hosts)
    hosts[1].call("serve", "g", 5000)
    child = os.fork()
    if child == 0:
        noise = b"\0\0" + os.urandom(1000)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaking:
            while os.getppid() != 1:
                for _ in range(BURST):
                    speaking.sendto(noise, (hosts[1].address, PORT))
                select.select([], [], [], BREATH_S)
        os._exit(0)
    before = [hosts[1].call("refused")]
    if mode == "root":
        counted(hosts[1:], before, BURST // 2)  # it has begun
    told: dict[str, Any] = {"sent": hosts[0].call("inside", "g", "send", inside(1), 5000, 4 << 20)}
    (told["refused"],) = counted(hosts[1:], before, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told["left"] = [host.call("finish") for host in hosts]
    return told


def restarts(hosts: list[Host], mode: str) -> dict[str, Any]:
    """A relay is killed, then a whole lane is opened again: with the same secret, so that old keys would still fit."""
    open_gang(hosts)
    hosts[0].call("serve", "g", 5000)
    ask: tuple[Any, ...] = ("inside", "g", "send", inside(0), 5000, 1 << 20)
    told: dict[str, Any] = {"before": hosts[1].call(*ask)}
    for word, host in (("the other's relay", hosts[0]), ("its own relay", hosts[1])):
        if mode == "direct":
            told[word] = host.call("relays")
            continue
        (pid,) = host.call("relays")
        host.call("kill", pid)
        if mode == "wireguard" and host is hosts[1]:
            until_back(host)  # its interface ends with wireguard-go, and comes back
        told[word] = [hosts[1].call(*ask), host.call("relays") != [pid]]
    hosts[1].call("close", "g")
    hosts[1].call("open", "g", 1, peers(2), SECRET)
    told["its lane"] = hosts[1].call(*ask)
    told["left"] = [host.call("finish") for host in hosts]
    return told


def until_back(host: Host) -> None:
    end = time.monotonic() + PATIENCE_S
    while "gang0" not in host.call("inside", "g", "routed") and time.monotonic() < end:
        select.select([], [], [], 0.02)


def killed(hosts: list[Host], mode: str) -> dict[str, Any]:
    """An agent is killed without warning: how long anything of it lives on."""
    open_gang(hosts)
    told: dict[str, Any] = {"relays": [len(host.call("relays")) for host in hosts]}
    if mode in ("root", "wireguard"):
        told["rights"] = hosts[1].call("relay_rights")
    pids = hosts[1].call("relays") + hosts[1].call("helpers")
    hosts[1].kill()
    began = time.monotonic()
    while any(alive(pid) for pid in pids) and time.monotonic() < began + PATIENCE_S:
        select.select([], [], [], 0.02)
    told["children"] = len(pids)
    told["outlived"] = [pid for pid in pids if alive(pid)]
    told["left"] = hosts[0].call("finish")
    return told


def swept(hosts: list[Host], _: str) -> dict[str, Any]:
    """Two agents on one machine: each start removes only its own leftovers."""
    names = ["gpoolaaaa0g99", "gpoolaaaa1g99"]
    pids = [host.call("orphan", name) for host, name in zip(hosts, names, strict=True)]
    told: dict[str, Any] = {"left": hosts[0].call("sweep", names[0])}
    told["alive"] = [alive(pid) for pid in pids]
    hosts[1].call("sweep", names[1])
    told["alive then"] = [alive(pid) for pid in pids]
    return told


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


CASES: dict[str, Callable[[list[Host], str], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        talk,
        forbidden,
        egress,
        in_docker,
        in_podman,
        impostor,
        outsider,
        spoofs,
        together,
        flood,
        restarts,
        killed,
        swept,
    )
}
MEMBERS = {"talk": 3}


def main() -> int:
    mode, case = sys.argv[1:3]
    mtu = int(sys.argv[3]) if len(sys.argv) > 3 else 1500
    must(libc.unshare(CLONE_NEWNET | CLONE_NEWNS), "unshare")
    must(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "slave")
    with tempfile.TemporaryDirectory() as place:
        if mode == "rootless":
            open_tun(Path(place))
            source = Path(__file__).resolve().parents[3]
            open_the_way(Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), source)
            Path(place).chmod(0o711)
        hosts = build_site(MEMBERS.get(case, 2), mode, Path(place), mtu)
        told = CASES[case](hosts, mode)
        must(libc.umount2(b"/dev/net/tun", 2) if mode == "rootless" else 0, "umount")
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # the site's threads serve for ever; its hosts end with us


if __name__ == "__main__":
    sys.exit(main())
