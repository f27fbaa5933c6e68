"""Addresses and variables of a gang's members, and the command lines of its engines. Pure.

Each member has one address in the gang's own network, which no other task or host is in. The first
member is the rendezvous. Ports are fixed, since nobody else uses that network.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from gpool.core.model import Allocation, Engine

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


def variables(rank: int, nodes: int) -> tuple[tuple[str, str], ...]:
    """Return a member's environment variables, for any engine; the task's own variables take precedence."""
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
        ("NCCL_IB_DISABLE", "1"),  # no InfiniBand device in a sandbox; NCCL would wait for it
        ("UCX_NET_DEVICES", INTERFACE),
        ("OMPI_MCA_btl_tcp_if_include", INTERFACE),
    )


def hosts(rank: int, nodes: int, own_name: str) -> str:
    """Return lines for /etc/hosts: members as rank0, rank1, …, and this member under its own name too."""
    lines = [f"{address_of(one)} rank{one}" for one in range(nodes)]
    lines[rank] += f" {own_name}"
    return "".join(f"{line}\n" for line in lines)


def engine_words(engine: Engine, rank: int, nodes: int, part: Allocation) -> tuple[str, ...]:
    """Return the interpreter arguments that start this member of the engine; empty without an engine.

    torchrun's arguments end where the task's command follows; Ray's are complete.
    """
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
