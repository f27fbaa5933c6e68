"""Hardware slices: never two in one place, strangers beside each other nowhere else, and what is free is told truly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.ids import UserId
from gpool.core.model import GIB, MIB, Allocation, Gpu, GpuRequest, Sharing, Slice, SliceProfile
from gpool.core.scheduler.place.fit import Unfit, fit, slice_of, unfit, usable
from gpool.core.scheduler.state.capacity import Room
from gpool.core.specs import gpu_slices
from gpool.server.store.rows import allocation_from, allocation_text
from tests.core.scheduler.state.builders import (
    NOW,
    a_gpu,
    a_node,
    a_shape,
    a_state,
    apply,
    enqueue,
    plan,
)

H200 = (
    SliceProfile("1g.18gb", 16384 * MIB, 1, 1, (0, 1, 2, 3, 4, 5, 6)),
    SliceProfile("1g.35gb", 33280 * MIB, 1, 2, (0, 2, 4, 6)),
    SliceProfile("2g.35gb", 33280 * MIB, 2, 2, (0, 2, 4)),
    SliceProfile("3g.71gb", 71424 * MIB, 3, 4, (0, 4)),
    SliceProfile("4g.71gb", 71424 * MIB, 4, 4, (0,)),
    SliceProfile("7g.141gb", 143360 * MIB, 7, 8, (0,)),
)
A100 = (  # of 40 GB
    SliceProfile("1g.5gb", 4864 * MIB, 1, 1, (0, 1, 2, 3, 4, 5, 6)),
    SliceProfile("1g.10gb", 9856 * MIB, 1, 2, (0, 2, 4, 6)),
    SliceProfile("2g.10gb", 9856 * MIB, 2, 2, (0, 2, 4)),
    SliceProfile("3g.20gb", 19968 * MIB, 3, 4, (0, 4)),
    SliceProfile("4g.20gb", 19968 * MIB, 4, 4, (0,)),
    SliceProfile("7g.40gb", 40192 * MIB, 7, 8, (0,)),
)


def a_cut_gpu(index: int = 0, profiles: tuple[SliceProfile, ...] = H200) -> Gpu:
    return a_gpu(index, "NVIDIA H200", sharing=Sharing.MIG, profiles=profiles)


moves = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=40
)


@given(profiles=st.sampled_from([H200, A100]), moves=moves)
def test_wherever_the_largest_slice_fits_every_smaller_one_always_does(
    profiles: tuple[SliceProfile, ...], moves: list[tuple[bool, int, int]]
) -> None:
    gpu, held = a_cut_gpu(profiles=profiles), list[tuple[int, int]]()
    for takes, which, where in moves:
        if takes:
            start = gpu_slices.start_for(gpu, profiles[which], held)
            if start is not None:
                held.append((start, profiles[which].size))
        elif held:
            held.pop(where % len(held))
        places = [place for start, size in held for place in range(start, start + size)]
        assert len(places) == len(set(places))
        left = gpu_slices.largest(gpu, held)
        for profile in profiles:
            smaller = left is not None and (
                profile.memory_bytes <= left.memory_bytes and profile.compute <= left.compute
            )
            assert bool(gpu_slices.free_starts(profile, held)) == smaller


def test_small_slices_leave_room_for_large_ones() -> None:
    gpu, held = a_cut_gpu(), list[tuple[int, int]]()
    for _ in range(3):
        start = gpu_slices.start_for(gpu, H200[0], held)
        assert start is not None
        held.append((start, 1))
    left = gpu_slices.largest(gpu, held)
    assert left is not None
    assert left.name == "4g.71gb"


def test_a_slice_is_as_large_as_the_smallest_profile_that_has_what_is_asked_for() -> None:
    gpu = a_cut_gpu()
    small = slice_of(gpu, GpuRequest(vram_bytes=6 * GIB))
    assert (small.profile, small.memory_bytes, small.share_milli) == ("1g.18gb", 16 * GIB, 142)
    assert slice_of(gpu, GpuRequest(vram_bytes=20 * GIB)).profile == "1g.35gb"
    assert slice_of(gpu, GpuRequest(share_milli=250)).profile == "3g.71gb"  # 35 GB of memory
    assert slice_of(gpu, GpuRequest()).profile == ""


def test_a_gpu_that_is_not_shared_lends_no_slices() -> None:
    node = a_node(gpus=1)
    alone = replace(node.offer.gpus[0], sharing=Sharing.EXCLUSIVE)
    node = replace(node, offer=replace(node.offer, gpus=(alone,)))
    assert unfit(node, a_shape(gpu=(GpuRequest(vram_bytes=GIB),))) is Unfit.GPU
    assert unfit(node, a_shape(gpu=(GpuRequest(),))) is None


def test_no_slice_is_larger_than_the_largest_profile() -> None:
    node = a_node(gpus=1)
    assert not usable(node, a_cut_gpu(profiles=A100), GpuRequest(vram_bytes=60 * GIB))


requests = st.sampled_from(
    [
        GpuRequest(),
        GpuRequest(share_milli=100),
        GpuRequest(share_milli=500),
        GpuRequest(vram_bytes=6 * GIB),
        GpuRequest(vram_bytes=40 * GIB),
    ]
)
steps = st.lists(
    st.one_of(st.tuples(st.integers(1, 3), requests), st.integers(0, 30)), min_size=1, max_size=60
)


@given(steps=steps)
def test_strangers_are_neighbours_on_hardware_slices_and_never_elsewhere(
    steps: list[tuple[int, GpuRequest] | int],
) -> None:
    gpus = (
        a_cut_gpu(0),
        a_gpu(1, "NVIDIA H200", sharing=Sharing.MPS),
        a_gpu(2, "NVIDIA H200", sharing=Sharing.EXCLUSIVE),
    )
    node = a_node(cpus=100)
    node = replace(node, offer=replace(node.offer, gpus=gpus))
    room, held = Room(node), list[tuple[UserId, Allocation]]()
    for step in steps:
        if isinstance(step, int):
            if held:
                room.give(held.pop(step % len(held))[1])
        else:
            user, request = UserId(step[0]), step[1]
            found = fit(node, room, a_shape(user, gpu=(request,)))
            if found is not None:
                allocation = found.numbered(len(held))
                room.take(allocation, user)
                held.append((user, allocation))
        for index in range(3):
            here = [(u, s) for u, a in held for s in a.slices if s.gpu_index == index]
            cut = [s for _, s in here if s.profile]
            assert not cut or index == 0
            assert not cut or len(cut) == len(here), "a card is cut, or it is not"
            sizes = {profile.name: profile.size for profile in H200}
            places = [n for s in cut for n in range(s.start, s.start + sizes[s.profile])]
            assert len(places) == len(set(places)), "never two in one place"
            assert cut or len({user for user, _ in here}) <= 1, "strangers never share"
            assert sum(s.memory_bytes for _, s in here) <= gpus[index].memory_bytes
    twin = Room(node)
    for user, allocation in held:
        twin.take(allocation, user)
    assert twin.truth() == room.truth()


def test_the_control_two_users_do_meet_on_a_card_that_is_cut() -> None:
    node = a_node()
    node = replace(node, offer=replace(node.offer, gpus=(a_cut_gpu(),)))
    room = Room(node)
    for user in (1, 2):
        found = fit(node, room, a_shape(user, gpu=(GpuRequest(vram_bytes=6 * GIB),)))
        assert found is not None
        room.take(found.numbered(user), UserId(user))
    assert fit(node, room, a_shape(3, gpu=(GpuRequest(),))) is None
    assert room.gpus[0].holders == 2


def test_a_pass_cuts_a_card_for_seven_users_and_lets_the_eighth_wait() -> None:
    node = a_node(cpus=20)
    node = replace(node, offer=replace(node.offer, gpus=(a_cut_gpu(),)))
    state = a_state(node)
    for user in range(1, 9):
        enqueue(state, a_shape(user, gpu=(GpuRequest(vram_bytes=6 * GIB),)), [user])
    enqueue(state, a_shape(9, gpu=(GpuRequest(),)), [9])
    placed = [part for place in plan(state, NOW).places for part in place.allocation.slices]
    assert sorted(part.start for part in placed) == [0, 1, 2, 3, 4, 5, 6]
    apply(state, plan(state, NOW))
    assert plan(state, NOW).places == ()


def test_a_card_held_whole_is_not_cut_for_its_holder_either() -> None:
    node = a_node(cpus=20)
    node = replace(node, offer=replace(node.offer, gpus=(a_cut_gpu(),)))
    state = a_state(node)
    enqueue(state, a_shape(1, gpu=(GpuRequest(),)), [1])
    apply(state, plan(state, NOW))
    enqueue(state, a_shape(1, gpu=(GpuRequest(vram_bytes=6 * GIB),)), [2])
    assert plan(state, NOW).places == ()


def test_the_store_keeps_where_a_hardware_slice_begins() -> None:
    cut = Allocation(3, 1000, GIB, (Slice(0, 16 * GIB, 142, "1g.18gb", 6), Slice(1, GIB, 10)))
    assert allocation_from(3, allocation_text(cut)) == cut
    assert allocation_from(1, "[1000,5,[[0,7,1000]]]") == Allocation(
        1, 1000, 5, (Slice(0, 7, 1000),)
    )


UNNESTED = (  # where the wide one still fits, a second small one does not
    SliceProfile("1g.18gb", 16384 * MIB, 1, 1, (7,)),
    SliceProfile("4g.71gb", 71424 * MIB, 4, 4, (0,)),
)


@pytest.mark.parametrize("cards", [(2,), (1, 1), (1, 2, 1)])
def test_a_slice_that_does_not_nest_on_the_best_card_goes_to_another(
    cards: tuple[int, ...],
) -> None:
    nodes = []
    for number, count in enumerate(cards, 1):
        node, gpus = a_node(number, cpus=8), tuple(a_cut_gpu(i, UNNESTED) for i in range(count))
        nodes.append(replace(node, offer=replace(node.offer, gpus=gpus)))
    state = a_state(*nodes)
    for task in range(1, sum(cards) + 2):
        enqueue(state, a_shape(user=task, gpu=(GpuRequest(vram_bytes=GIB),)), [task])
        apply(state, plan(state, NOW))
    assert sorted(state.held) == list(range(1, sum(cards) + 1))
    for node in nodes:
        taken = [line.allocation.slices[0] for line in state.nodes[node.id].lines.values()]
        assert len({part.gpu_index for part in taken}) == len(taken) == len(node.offer.gpus)
