"""What a gang's members are told: the same of the whole, each its own of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpool.core import gangs
from gpool.core.model import Allocation, Engine, Slice

GIB = 1024**3
PLAIN = Allocation(1, 2500, 4 * GIB, ())
TWO_GPUS = Allocation(1, 8000, 64 * GIB, (Slice(0, GIB, 1000), Slice(3, GIB, 1000)))
ranks = st.integers(2, gangs.MAX_NODES).flatmap(
    lambda nodes: st.tuples(st.integers(0, nodes - 1), st.just(nodes))
)


@given(ranks)
def test_members_never_share_an_address_and_always_meet_at_the_first(
    where: tuple[int, int],
) -> None:
    rank, nodes = where
    told = dict(gangs.variables(rank, nodes))
    addresses = told["GPOOL_ADDRESSES"].split(",")
    assert len(set(addresses)) == nodes
    assert addresses[rank] == told["GPOOL_ADDRESS"] == str(gangs.address_of(rank))
    assert told["MASTER_ADDR"] == addresses[0]
    assert (told["GPOOL_RANK"], told["GPOOL_NODES"]) == (str(rank), str(nodes))
    assert gangs.address_of(rank) in gangs.NETWORK
    assert gangs.address_of(rank) != gangs.NETWORK.broadcast_address


def test_torchrun_has_a_process_for_each_gpu_and_one_without() -> None:
    words = gangs.engine_words(Engine.TORCHRUN, 1, 4, TWO_GPUS)
    assert "--nproc-per-node=2" in words
    assert "--node-rank=1" in words
    assert "--nnodes=4" in words
    assert words[-1] == "--no-python"  # the command follows, whatever it is
    assert "--nproc-per-node=1" in gangs.engine_words(Engine.TORCHRUN, 0, 2, PLAIN)


def test_ray_has_one_head_and_the_others_go_to_it() -> None:
    head = gangs.engine_words(Engine.RAY, 0, 2, PLAIN)
    other = gangs.engine_words(Engine.RAY, 1, 2, PLAIN)
    assert "--head" in head
    assert "--head" not in other
    assert f"--address={gangs.ray_address()}" in other
    assert "--node-ip-address=10.211.0.2" in other
    assert "--num-cpus=2" in other
    assert "--num-gpus=2" in gangs.engine_words(Engine.RAY, 1, 2, TWO_GPUS)


@given(st.integers(1 << 28, 1 << 40))
def test_what_ray_is_told_it_may_take_always_fits_the_sandbox(memory_bytes: int) -> None:
    part = Allocation(1, 1000, memory_bytes, ())
    told = dict(
        word[2:].split("=") for word in gangs.engine_words(Engine.RAY, 1, 2, part) if "=" in word
    )
    assert int(told["memory"]) + int(told["object-store-memory"]) <= memory_bytes
    assert int(told["object-store-memory"]) <= memory_bytes // 2  # what /dev/shm gets


def test_no_engine_adds_no_words() -> None:
    assert gangs.engine_words(Engine.NONE, 0, 2, PLAIN) == ()
