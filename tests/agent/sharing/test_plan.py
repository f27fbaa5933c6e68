"""Which mode, which tenancy, who must leave, who holds too much: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.machine.nvml import GpuProcess
from gpool.agent.sharing.plan import (
    Abilities,
    Tenancy,
    choose,
    conflicts,
    mode_of,
    mps_limits,
    overdrawn,
    parse_modes,
    profiles_of,
    tenancy_of,
)
from gpool.core.errors import Invalid
from gpool.core.model import GIB, Gpu, Sharing, Slice
from gpool.testing.fake_nvml import H200_PROFILES, h200

ALL = Abilities(root=True, mps=True, tells_apart=True)
PROFILES = profiles_of(H200_PROFILES)
MEMORY = 140 * GIB


def a_gpu(sharing: Sharing = Sharing.TIMESLICE) -> Gpu:
    return Gpu(0, "GPU-0", "H200", "nvidia", MEMORY, sharing=sharing, profiles=PROFILES)


def test_profiles_with_media_engines_of_their_own_are_not_lent() -> None:
    assert [one.name for one in PROFILES] == [
        "1g.18gb",
        "1g.35gb",
        "2g.35gb",
        "3g.71gb",
        "4g.71gb",
        "7g.141gb",
    ]


@pytest.mark.parametrize(
    ("changes", "can", "modes", "chosen"),
    [
        ({}, ALL, None, Sharing.MPS),
        ({"mig": True}, ALL, None, Sharing.MIG),
        ({}, ALL, (Sharing.MIG,), Sharing.MIG),
        ({}, replace(ALL, root=False), (Sharing.MIG, Sharing.MPS), Sharing.MPS),
        ({}, replace(ALL, mps=False), None, Sharing.TIMESLICE),
        ({"capability": "6.1"}, ALL, None, Sharing.TIMESLICE),
        ({"capability": ""}, ALL, None, Sharing.TIMESLICE),
        ({}, replace(ALL, tells_apart=False), None, Sharing.EXCLUSIVE),
        ({"mig": True}, replace(ALL, root=False), None, Sharing.EXCLUSIVE),
        ({"mig": None}, ALL, (Sharing.MIG,), Sharing.EXCLUSIVE),
        ({}, ALL, (Sharing.EXCLUSIVE, Sharing.MPS), Sharing.EXCLUSIVE),
    ],
)
def test_the_first_mode_that_owner_card_and_agent_allow_is_chosen(
    changes: dict[str, object], can: Abilities, modes: tuple[Sharing, ...] | None, chosen: Sharing
) -> None:
    card = replace(h200(), **changes)  # type: ignore[arg-type]
    assert choose(card, PROFILES, can, modes) is chosen


def test_without_the_owners_word_mig_is_never_switched_on() -> None:
    for able in (ALL, replace(ALL, mps=False), replace(ALL, mps=False, tells_apart=False)):
        assert choose(h200(), PROFILES, able, None) is not Sharing.MIG


def test_an_unknown_mode_is_named() -> None:
    assert parse_modes(" mig , mps") == (Sharing.MIG, Sharing.MPS)
    assert parse_modes("  ") is None
    with pytest.raises(Invalid, match="'turns'"):
        parse_modes("mps,turns")


def test_a_whole_gpu_is_held_alone_however_slices_of_it_are_shared() -> None:
    for sharing in Sharing:
        assert mode_of(a_gpu(sharing), Slice(0, MEMORY, 1000)) is Sharing.EXCLUSIVE
    assert mode_of(a_gpu(Sharing.MPS), Slice(0, GIB, 1000)) is Sharing.MPS
    assert mode_of(a_gpu(Sharing.MPS), Slice(0, GIB, 10, "1g.18gb", 3)) is Sharing.MIG
    # a card that is shared otherwise since: nobody beside it
    assert mode_of(a_gpu(Sharing.MIG), Slice(0, GIB, 10)) is Sharing.EXCLUSIVE


tenancies = st.builds(
    tenancy_of,
    st.just(a_gpu(Sharing.MPS)),
    st.sampled_from(
        [
            Slice(0, MEMORY, 1000),
            Slice(0, GIB, 10),
            *(Slice(0, GIB, 10, one.name, start) for one in PROFILES for start in one.starts),
        ]
    ),
    st.integers(1, 3),
)


@given(there=st.sets(tenancies, max_size=6), wanted=tenancies)
def test_strangers_are_never_left_beside_anything_but_hardware_slices(
    there: set[Tenancy], wanted: Tenancy
) -> None:
    leaving = conflicts(there, wanted)
    for other in there - set(leaving) - {wanted}:
        assert other.mode is wanted.mode is Sharing.MIG
        places = set(range(other.start, other.start + other.size))
        assert places.isdisjoint(range(wanted.start, wanted.start + wanted.size))
    assert wanted not in leaving


def test_tenancies_of_other_cards_are_none_of_its_business() -> None:
    here = Tenancy("GPU-0", Sharing.MPS, 1)
    assert conflicts({Tenancy("GPU-1", Sharing.EXCLUSIVE, 2)}, here) == []
    assert conflicts({Tenancy("GPU-0", Sharing.MPS, 2)}, here) == [Tenancy("GPU-0", Sharing.MPS, 2)]


@given(
    held=st.lists(
        st.tuples(st.integers(1, 20), st.one_of(st.none(), st.integers(0, 10 * GIB))), max_size=20
    ),
    limits=st.dictionaries(st.sampled_from("abc"), st.integers(1, 12 * GIB), min_size=3),
)
def test_only_who_holds_more_than_its_slice_is_ever_named(
    held: list[tuple[int, int | None]], limits: dict[str, int]
) -> None:
    owner_of = {pid: "abc"[pid % 3] for pid in range(1, 15)}  # the others are strangers to us
    named = overdrawn([GpuProcess(pid, size) for pid, size in held], owner_of, limits)
    for owner in "abc":
        used = sum(size or 0 for pid, size in held if owner_of.get(pid) == owner)
        assert (owner in named) == (used > limits[owner])
        assert named.get(owner, used) == used


def test_a_server_lets_any_client_have_what_the_largest_slice_has() -> None:
    limits = mps_limits([Slice(0, 6 * GIB, 43), Slice(0, 20 * GIB, 250)])
    assert (limits.memory_bytes, limits.percentage) == (20 * GIB, 25)
    assert mps_limits([Slice(0, 5, 1)]).percentage == 1
