"""Predicted run times: means of what ended lately, from the nearest kind that is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.model import SECOND, GpuRequest, Span
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.predict.run_times import KEPT, LEAST, MAX_KEYS, Predictions, model_of
from gpool.core.scheduler.state.events import RunTimesObserved
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, apply, enqueue, plan


def test_nothing_is_predicted_from_too_few() -> None:
    known = Predictions()
    known.observe(a_shape(), LEAST - 1, Span(100))
    assert known.of(a_shape()) is None


def test_the_same_task_on_another_model_takes_another_time() -> None:
    known, shape = Predictions(), a_shape(gpu=(GpuRequest(),))
    known.observe(shape, 3, Span(3 * 100), "NVIDIA H200")
    known.observe(shape, 3, Span(3 * 700), "Tesla T4")
    assert known.of(shape, "NVIDIA H200") == 100
    assert known.of(shape, "Tesla T4") == 700
    assert known.of(shape) == 400  # wherever it may be
    assert known.of(shape, "NVIDIA A10G") == 400


def test_a_stranger_of_the_same_needs_is_told_by_those_on_its_model() -> None:
    known = Predictions()
    known.observe(a_shape(1, gpu=(GpuRequest(),)), 3, Span(3 * 100), "NVIDIA H200")
    known.observe(a_shape(2, gpu=(GpuRequest(),)), 3, Span(3 * 700), "Tesla T4")
    assert known.of(a_shape(3, gpu=(GpuRequest(),)), "Tesla T4") == 700
    assert known.of(a_shape(3, cpu_milli=7)) == 400


def test_another_name_is_another_kind() -> None:
    known = Predictions()
    known.observe(a_shape(group="short"), 3, Span(3 * 10))
    known.observe(a_shape(group="long"), 3, Span(3 * 10_000))
    assert known.of(a_shape(group="short")) == 10
    assert known.of(a_shape(group="long")) == 10_000


def test_a_script_that_is_not_known_yet_is_told_by_others_of_its_program_before_strangers() -> None:
    known = Predictions()
    known.observe(a_shape(2, "python train.py"), 9, Span(9 * 5_000))
    known.observe(a_shape(group="python train.py"), 3, Span(3 * 1_000))
    known.observe(a_shape(group="python eval.py"), 3, Span(3 * 10))
    assert known.of(a_shape(group="python train.py")) == 1_000
    assert known.of(a_shape(group="python eval.py")) == 10
    assert known.of(a_shape(group="python new.py")) == 505
    assert known.of(a_shape(group="ffmpeg")) == (9 * 5_000 + 3 * 1_000 + 3 * 10) // 15
    assert known.of(a_shape(3, "python train.py")) == (9 * 5_000 + 3 * 1_000 + 3 * 10) // 15


@given(st.lists(st.integers(1, 10**12), min_size=LEAST, max_size=3 * KEPT))
def test_it_is_always_the_mean_of_the_last_ones(durations: list[int]) -> None:
    known = Predictions()
    for each in durations:
        known.observe(a_shape(), 1, Span(each))
    last = durations[-KEPT:]
    assert known.of(a_shape()) == sum(last) // len(last)


def test_many_kinds_never_take_more_than_their_room() -> None:
    known = Predictions()
    for number in range(MAX_KEYS // 2 + 100):
        known.observe(a_shape(group=str(number), cpu_milli=number), 3, Span(300))
    assert known.of(a_shape(group="0", cpu_milli=0)) == 100  # by all of them
    assert known.of(a_shape(group=str(MAX_KEYS // 2), cpu_milli=MAX_KEYS // 2)) == 100
    assert len(known._seen) <= MAX_KEYS


def test_the_state_learns_by_model_and_shortest_goes_first() -> None:
    state, model = a_state(a_node(1, gpus=1)), "NVIDIA A10G"
    quick, slow = (a_shape(1, name, gpu=(GpuRequest(),)) for name in ("quick", "slow"))
    state.fold(RunTimesObserved(slow, 3, Span(3 * 900 * SECOND), model))
    state.fold(RunTimesObserved(quick, 3, Span(3 * 60 * SECOND), model))
    enqueue(state, slow, [1])
    enqueue(state, quick, [2], at=NOW + 1)
    decided = plan(state, NOW, Policy(order="shortest"))
    assert [int(grant.task) for place in decided.places for grant in place.grants] == [2]
    apply(state, decided)
    line = next(iter(state.held.values()))
    assert model_of(state.nodes[line.node].node, line.allocation) == model
