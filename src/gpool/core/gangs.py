"""Gangs: addresses, variables and engine commands of the members, and the outcome from their ends. Pure.

A gang is one task with one end, decided after the last member has released its lease: when a node dies, its peers'
programs fail long before the missed heartbeat, so only all ends together show the cause. Precedence: success; a lost
member; a preempted or returned member; a member that could not be started; the first other end. `call` stops the
remaining members after the first end that prevents the gang from continuing. Its answer never changes, because ends are
numbered in commit order.

Each member has one address in the gang's private network, so ports are fixed. The first member is the rendezvous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network

from gpool.core.model import Allocation, EndReason, Engine, OnLoss

YIELDED = frozenset({EndReason.PREEMPTED, EndReason.HANDED_BACK})
"""Ends through no fault of the task."""


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """End of one member; `place`: its position among the gang's ends, from 1."""

    rank: int
    place: int
    reason: EndReason
    exit_code: int | None = None

    @property
    def is_success(self) -> bool:
        exited = self.reason is EndReason.EXITED and self.exit_code == 0
        return exited or self.reason is EndReason.RETURNED


@dataclass(frozen=True, slots=True)
class GangStanding:
    nodes: int
    engine: Engine
    on_loss: OnLoss
    ends: tuple[MemberEnd, ...] = ()  # unordered
    making_room: bool = False  # the whole gang was preempted before any member's end


class GangOrder(StrEnum):
    END = "end"  # the gang has ended
    BACK = "back"  # the gang is requeued: save checkpoints first


@dataclass(frozen=True, slots=True)
class GangVerdict:
    """Outcome as the end of one attempt; `rank` is the member that caused it."""

    rank: int
    reason: EndReason
    exit_code: int | None = None


def call(gang: GangStanding) -> GangOrder | None:
    """Order to the members that still run; None: continue."""
    for end in sorted(gang.ends, key=_place):
        if gang.engine is Engine.RAY and end.rank and end.reason is EndReason.EXITED:
            continue  # exit of a Ray worker: rank 0 decides
        if end.is_success and not (gang.engine is Engine.RAY and end.rank == 0):
            continue  # this member is done
        if gang.making_room or end.reason in YIELDED:
            return GangOrder.BACK
        if end.reason is EndReason.LOST and gang.on_loss is OnLoss.REFORM:
            return GangOrder.BACK
        return GangOrder.END
    return None


def verdict(gang: GangStanding) -> GangVerdict | None:
    """None while a member holds its lease."""
    if len(gang.ends) < gang.nodes:
        return None
    ends = sorted(gang.ends, key=_place)
    first = next(end for end in ends if end.rank == 0)
    decisive = [first] if gang.engine is Engine.RAY else ends
    if all(end.is_success for end in decisive):
        return GangVerdict(0, first.reason, first.exit_code)
    cause = _first(ends, {EndReason.LOST}) or _first(ends, YIELDED)
    if cause is not None:
        return GangVerdict(cause.rank, cause.reason)
    own = _first(ends, {EndReason.NODE_FAILED}) or next(
        end for end in _judged(gang.engine, ends) if not end.is_success
    )
    if gang.making_room:
        return GangVerdict(own.rank, EndReason.PREEMPTED)
    return GangVerdict(own.rank, own.reason, own.exit_code)


def _judged(engine: Engine, ends: Sequence[MemberEnd]) -> Iterable[MemberEnd]:
    if engine is not Engine.RAY:
        return ends
    return (end for end in ends if end.rank == 0 or end.reason is not EndReason.EXITED)


def _first(ends: Sequence[MemberEnd], reasons: Iterable[EndReason]) -> MemberEnd | None:
    return next((end for end in ends if end.reason in reasons), None)


def _place(end: MemberEnd) -> int:
    return end.place


def marked(data: bytes, rank: int, *, in_line: bool) -> bytes:
    """`in_line`: the previous chunk ended mid-line."""
    if not rank or not data:
        return data
    mark = b"[%d] " % rank
    body, last = data[:-1].replace(b"\n", b"\n" + mark), data[-1:]
    return (b"" if in_line else mark) + body + last


class GangLink(StrEnum):
    """Transport between the members of a gang, best first."""

    DIRECT = "direct"  # the site's link itself, unencrypted: its owner declared it trusted
    WIREGUARD = "wireguard"
    RELAY = "relay"  # user space on both ends; needs no privileges


def common_link(offered: Iterable[Collection[str]]) -> GangLink:
    """Choose the best transport that every member's node offers (`Offer.gang_links`); every node can run a relay."""
    nodes = [frozenset(links) for links in offered]
    best = (link for link in GangLink if all(link.value in links for links in nodes))
    return next(best, GangLink.RELAY) if nodes else GangLink.RELAY


NETWORK = IPv4Network("10.211.0.0/16")
"""Network of every gang: gangs never see each other, so all use the same addresses."""

INTERFACE = "gang0"
MAX_NODES = 1024

MEETING_PORT = 29500
"""Port of torchrun's rendezvous on the first member; `MASTER_PORT` for every engine."""
RAY_PORT = 6379
GATE_PORT = 6378
"""Port on which the workers of a Ray cluster report to the head and notice its end."""

OBJECT_STORE = 3, 10
"""Fraction of a member's memory for Ray's object store; its files lie in /dev/shm, which gets half."""
LEAST_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum


def address_of(rank: int) -> IPv4Address:
    return NETWORK.network_address + rank + 1


def variables(rank: int, nodes: int, *, rdma: bool = False) -> tuple[tuple[str, str], ...]:
    """The task's own variables take precedence. `rdma`: the member has RDMA devices."""
    head = str(address_of(0))
    return (
        ("GPOOL_RANK", str(rank)),
        ("GPOOL_NODES", str(nodes)),
        ("GPOOL_ADDRESS", str(address_of(rank))),
        ("GPOOL_ADDRESSES", ",".join(str(address_of(one)) for one in range(nodes))),
        ("GPOOL_INTERFACE", INTERFACE),
        ("MASTER_ADDR", head),
        ("MASTER_PORT", str(MEETING_PORT)),
        ("GLOO_SOCKET_IFNAME", INTERFACE),
        ("NCCL_SOCKET_IFNAME", INTERFACE),
        ("TP_SOCKET_IFNAME", INTERFACE),
        # NCCL would wait for an InfiniBand device where there is none
        *(() if rdma else (("NCCL_IB_DISABLE", "1"),)),
        ("UCX_NET_DEVICES", INTERFACE),
        ("OMPI_MCA_btl_tcp_if_include", INTERFACE),
    )


def hosts(rank: int, nodes: int, own_name: str) -> str:
    lines = [f"{address_of(one)} rank{one}" for one in range(nodes)]
    lines[rank] += f" {own_name}"
    return "".join(f"{line}\n" for line in lines)


def engine_words(engine: Engine, rank: int, nodes: int, part: Allocation) -> tuple[str, ...]:
    """Interpreter arguments; torchrun's end where the task's command follows, Ray's are complete."""
    if engine is Engine.TORCHRUN:
        return (
            "-m",
            "torch.distributed.run",
            f"--nnodes={nodes}",
            f"--node-rank={rank}",
            f"--nproc-per-node={max(1, len(part.slices))}",
            f"--master-addr={address_of(0)}",
            f"--master-port={MEETING_PORT}",
            "--no-python",
        )
    if engine is Engine.RAY:
        return ("-m", "ray.scripts.scripts", "start", *_ray_words(rank, part))
    return ()


def _ray_words(rank: int, part: Allocation) -> tuple[str, ...]:
    times, of = OBJECT_STORE
    store = max(LEAST_OBJECT_STORE_BYTES, part.memory_bytes * times // of)
    head = f"{address_of(0)}:{RAY_PORT}"
    place = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false") if rank == 0 else ()
    return (
        *(place or (f"--address={head}",)),
        f"--node-ip-address={address_of(rank)}",
        f"--num-cpus={max(1, part.cpu_milli // 1000)}",
        f"--num-gpus={len(part.slices)}",
        f"--memory={max(1, part.memory_bytes - store)}",
        f"--object-store-memory={store}",
        "--disable-usage-stats",
    )


def ray_address() -> str:
    return f"{address_of(0)}:{RAY_PORT}"
