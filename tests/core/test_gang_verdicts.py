"""What becomes of a gang: decided once, from the ends of all its members."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.gangs import GangOrder, GangStanding, GangVerdict, MemberEnd, call, marked, verdict
from gpool.core.model import EndReason, Engine, OnLoss

NO_FAULT = {EndReason.LOST, EndReason.PREEMPTED, EndReason.HANDED_BACK}
REASONS = sorted(set(EndReason) - {EndReason.RETURNED, EndReason.RAISED, EndReason.LOSES_NODES})


@st.composite
def endings(draw: st.DrawFn) -> GangStanding:
    """A gang all of whose members have ended, in some order."""
    nodes = draw(st.integers(2, 5))
    ends = []
    for place, rank in enumerate(draw(st.permutations(range(nodes))), 1):
        reason = draw(st.sampled_from([EndReason.EXITED, *REASONS]))
        code = draw(st.sampled_from([0, 0, 1, 137])) if reason is EndReason.EXITED else None
        ends.append(MemberEnd(rank, place, reason, code))
    return GangStanding(
        nodes,
        draw(st.sampled_from(Engine)),
        draw(st.sampled_from(OnLoss)),
        tuple(ends),
        draw(st.booleans()),
    )


def first(gang: GangStanding, count: int) -> GangStanding:
    """As it stood after so many ends."""
    ends = tuple(end for end in gang.ends if end.place <= count)
    return GangStanding(gang.nodes, gang.engine, gang.on_loss, ends, gang.making_room)


@given(endings())
def test_a_gang_always_ends_once_all_have_let_go_and_never_before(gang: GangStanding) -> None:
    for count in range(gang.nodes):
        assert verdict(first(gang, count)) is None
    assert verdict(gang) is not None


@pytest.mark.parametrize("engine", Engine)
def test_one_member_alone_never_makes_it_a_success(engine: Engine) -> None:
    """By a word that only functions end with, say: it is one of several owners' nodes that says it."""
    ends = (MemberEnd(1, 1, EndReason.RETURNED), MemberEnd(0, 2, EndReason.EXITED, 1))
    assert call(GangStanding(2, engine, OnLoss.REFORM, ends[:1])) is None
    assert verdict(GangStanding(2, engine, OnLoss.REFORM, ends)) == GangVerdict(
        0, EndReason.EXITED, 1
    )


@given(endings())
def test_a_call_is_never_taken_back(gang: GangStanding) -> None:
    calls = [call(first(gang, count)) for count in range(gang.nodes + 1)]
    made = [each for each in calls if each is not None]
    assert len(set(made)) <= 1
    assert calls == [None] * (len(calls) - len(made)) + made


@given(endings(), st.randoms(use_true_random=False))
def test_the_order_in_which_rows_are_read_never_matters(gang: GangStanding, dice: object) -> None:
    ends = list(gang.ends)
    dice.shuffle(ends)  # type: ignore[attr-defined]
    again = GangStanding(gang.nodes, gang.engine, gang.on_loss, tuple(ends), gang.making_room)
    assert verdict(again) == verdict(gang)
    assert call(again) == call(gang)


@given(endings())
def test_a_success_is_always_a_success_of_all_that_count(gang: GangStanding) -> None:
    found = verdict(gang)
    assert found is not None
    counting = [end for end in gang.ends if gang.engine is not Engine.RAY or end.rank == 0]
    succeeded = found.reason is EndReason.EXITED and found.exit_code == 0
    assert succeeded == all(end.is_success for end in counting)


@given(endings())
def test_a_gang_never_fails_for_what_was_nobodys_fault(gang: GangStanding) -> None:
    found = verdict(gang)
    assert found is not None
    blameless = gang.making_room or any(end.reason in NO_FAULT for end in gang.ends)
    if blameless and (found.reason, found.exit_code) != (EndReason.EXITED, 0):
        assert found.reason in NO_FAULT
        if any(end.reason is EndReason.LOST for end in gang.ends):
            assert found.reason is EndReason.LOST


@given(endings())
def test_what_is_blamed_is_always_an_end_of_that_rank(gang: GangStanding) -> None:
    found = verdict(gang)
    assert found is not None
    (end,) = [end for end in gang.ends if end.rank == found.rank]
    assert found.reason is end.reason or gang.making_room


@given(endings())
def test_if_all_ended_well_no_order_ever_makes_a_difference(gang: GangStanding) -> None:
    ends = tuple(MemberEnd(end.rank, end.place, EndReason.EXITED, 0) for end in gang.ends)
    well = GangStanding(gang.nodes, gang.engine, gang.on_loss, ends, gang.making_room)
    assert verdict(well) == GangVerdict(0, EndReason.EXITED, 0)


TWO = [
    # of rank 0, of rank 1, whichever came first -> verdict
    ((EndReason.EXITED, 0), (EndReason.EXITED, 3), GangVerdict(1, EndReason.EXITED, 3)),
    ((EndReason.EXITED, 1), (EndReason.LOST, None), GangVerdict(1, EndReason.LOST)),
    ((EndReason.EXITED, 0), (EndReason.LOST, None), GangVerdict(1, EndReason.LOST)),
    ((EndReason.LOST, None), (EndReason.PREEMPTED, None), GangVerdict(0, EndReason.LOST)),
    ((EndReason.EXITED, 1), (EndReason.PREEMPTED, None), GangVerdict(1, EndReason.PREEMPTED)),
    ((EndReason.TIMED_OUT, None), (EndReason.EXITED, 0), GangVerdict(0, EndReason.TIMED_OUT)),
]


@pytest.mark.parametrize(("one", "other", "becomes"), TWO)
def test_these_ends_of_two_come_to_the_same_in_either_order(
    one: tuple[EndReason, int | None], other: tuple[EndReason, int | None], becomes: GangVerdict
) -> None:
    for places in permutations((1, 2)):
        ends = (MemberEnd(0, places[0], *one), MemberEnd(1, places[1], *other))
        assert verdict(GangStanding(2, Engine.TORCHRUN, OnLoss.REFORM, ends)) == becomes


def test_of_two_failures_the_first_is_told() -> None:
    ends = (MemberEnd(0, 2, EndReason.EXITED, 1), MemberEnd(1, 1, EndReason.EXITED, 2))
    assert verdict(GangStanding(2, Engine.NONE, OnLoss.REFORM, ends)) == GangVerdict(
        1, EndReason.EXITED, 2
    )


def test_of_a_cluster_rank_0_decides_whatever_its_helpers_exit_with() -> None:
    helper = MemberEnd(1, 1, EndReason.EXITED, 1)
    assert call(GangStanding(2, Engine.RAY, OnLoss.REFORM, (helper,))) is None
    done = GangStanding(
        2, Engine.RAY, OnLoss.REFORM, (helper, MemberEnd(0, 2, EndReason.EXITED, 0))
    )
    assert verdict(done) == GangVerdict(0, EndReason.EXITED, 0)
    head = MemberEnd(0, 1, EndReason.EXITED, 0)
    assert call(GangStanding(2, Engine.RAY, OnLoss.REFORM, (head,))) is GangOrder.END


@pytest.mark.parametrize(
    ("on_loss", "told"), [(OnLoss.REFORM, GangOrder.BACK), (OnLoss.END, GangOrder.END)]
)
def test_who_stays_behind_is_told_what_the_task_asks_for(on_loss: OnLoss, told: GangOrder) -> None:
    ends = (MemberEnd(1, 1, EndReason.LOST),)
    assert call(GangStanding(2, Engine.TORCHRUN, on_loss, ends)) is told


@given(st.binary(), st.integers(1, 9), st.lists(st.integers(0, 40), max_size=5))
def test_marks_never_depend_on_how_output_is_cut(data: bytes, rank: int, cuts: list[int]) -> None:
    pieces, last = [], 0
    for cut in [*sorted(cuts), len(data)]:
        pieces.append(data[last:cut])
        last = max(last, cut)
    out, in_line = b"", False
    for piece in pieces:
        out += marked(piece, rank, in_line=in_line)
        in_line = not piece.endswith(b"\n") if piece else in_line
    assert out == marked(data, rank, in_line=False)
    mark = b"[%d] " % rank
    assert b"".join(line.removeprefix(mark) for line in out.splitlines(True)) or not data
    assert out.count(mark) >= len(data.split(b"\n")) - data.endswith(b"\n") - (not data)


def test_rank_0_is_not_marked_and_others_are_at_each_line() -> None:
    assert marked(b"a\nb", 0, in_line=False) == b"a\nb"
    assert marked(b"a\nb\n", 2, in_line=False) == b"[2] a\n[2] b\n"
    assert marked(b"a\nb", 1, in_line=True) == b"a\n[1] b"
