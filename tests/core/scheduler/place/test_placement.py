"""What room is worth, and that pricing it serves the usual mixes never worse than not doing so."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.model import GIB, GpuRequest, Node, Requirements, Shape
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.place.fit import suits
from gpool.core.scheduler.place.portfolio import (
    LEAST_ARRIVALS,
    WAYS,
    choose,
    priced,
    unallocated_pct,
)
from gpool.core.scheduler.place.pricing import (
    USUAL,
    WEIGHT,
    FragmentationTarget,
    Pricing,
    least_gpus,
    price,
    remnant_values,
    size_of,
)
from gpool.core.specs import gpu
from tests.core.scheduler.state.builders import NOW, a_node, a_shape, a_state, apply, enqueue, plan

DEMAND = st.dictionaries(st.integers(1, 50).map(lambda n: 20 * n), st.integers(1, 500), min_size=1)
OPENB = {220: 57, 230: 136, 320: 327, 460: 132, 470: 757, 550: 75, 590: 76, 650: 249, 810: 1076}
"""About the slices of the openb trace; its whole GPUs cost one each and change nothing."""


def wanting(spec: str, user: int = 1, **more: Any) -> Shape:
    return a_shape(user, gpu=gpu.parse(spec), **more)


# ---- remnants


def patterns(sizes: list[int]) -> list[tuple[int, ...]]:
    """Every set of sizes that fits one GPU."""
    return [
        pattern
        for length in range(1, 1000 // min(sizes) + 1)
        for pattern in combinations_with_replacement(sizes, length)
        if sum(pattern) <= 1000
    ]


@given(DEMAND)
def test_nothing_that_fits_a_gpu_is_ever_worth_more_than_the_gpu(demand: dict[int, int]) -> None:
    worth = remnant_values(demand)
    assert worth[0] == 0
    assert worth[1000] <= 1 + 1e-6
    assert all(less <= more + 1e-9 for less, more in pairwise(worth))
    for left in (190, 250, 500, 730):
        assert worth[left] + worth[1000 - left] <= worth[1000] + 1e-6


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([200, 300, 450, 600, 810]), st.integers(1, 50), min_size=1))
def test_the_prices_are_the_best_there_are(demand: dict[int, int]) -> None:
    """No price is too high (above), and together they reach what packing costs at least: both bounds meet."""
    bound, worth = least_gpus(demand), remnant_values(demand)
    packed = first_fit_decreasing(demand)
    assert bound <= packed + 1e-6
    assert bound >= sum(size * count for size, count in demand.items()) / 1000 - 1e-6
    for pattern in patterns(sorted(demand)):
        assert sum(worth[size] for size in pattern) <= 1 + 1e-6
    assert sum(worth[size] * count for size, count in demand.items()) >= bound - 1e-6


def first_fit_decreasing(demand: dict[int, int]) -> int:
    rooms: list[int] = []
    for size in sorted(demand, reverse=True):
        for _ in range(demand[size]):
            place = next((i for i, room in enumerate(rooms) if room >= size), None)
            if place is None:
                rooms.append(1000 - size)
            else:
                rooms[place] -= size
    return len(rooms)


def test_the_rest_beside_a_task_of_0_81_is_worth_nothing() -> None:
    worth = remnant_values(OPENB)
    assert [round(worth[r], 3) for r in (190, 319, 470, 530, 810)] == [0.0, 0.25, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("demand", "gpus"),
    [
        (OPENB, 1936.25),
        ({300: 10, 450: 20, 260: 30}, 20.833333),
        ({510: 7, 490: 3, 250: 11, 240: 5}, 9.0),
        ({700: 5, 310: 50, 290: 20, 150: 9}, 28.166667),
        ({334: 10, 333: 20, 120: 100}, 22.5),
        ({990: 3, 500: 3, 340: 7, 170: 40}, 15.3),
    ],
)
def test_the_solver_finds_what_scipys_found(demand: dict[int, int], gpus: float) -> None:
    """Recorded: linprog over all patterns that fit one GPU."""
    assert least_gpus(demand) == pytest.approx(gpus)


def test_without_slices_only_whole_gpus_are_worth_anything() -> None:
    assert remnant_values({})[999:] == (0.0, 1.0)
    assert remnant_values({1000: 7})[999:] == (0.0, 1.0)


# ---- pricing


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=30), st.randoms())
def test_the_order_of_arrivals_never_changes_a_pricing(
    arrivals: list[tuple[int, int]], random: Random
) -> None:
    kinds = [Requirements(gpu=gpu.parse(spec)) for spec in ("0", "1", "0.3", "0.8", "4", "T4")]
    came = [(kinds[kind], count) for kind, count in arrivals]
    before = price(came)
    random.shuffle(came)
    assert price(came) == before
    assert sum(weight for _, weight in before.mix) <= WEIGHT


def test_a_slice_of_memory_has_the_size_it_takes_of_a_card() -> None:
    request = GpuRequest(vram_bytes=6 * GIB)
    assert [size_of(request, card * GIB) for card in (6, 24, 48)] == [1000, 250, 125]
    assert size_of(GpuRequest(share_milli=300)) == 300


# ---- fragmentation


def fragments_by_definition(node: Node, cpu: int, free: list[int], pricing: Pricing) -> int:
    lost = 0
    for needs, weight in pricing.mix:
        request = needs.gpu[0]
        size = size_of(request)
        fitting = [each for each in free if each >= size]
        if suits(node, needs) and cpu >= needs.cpu_milli and len(fitting) >= request.count:
            lost += weight * sum(each for each in free if each < size)
        else:
            lost += weight * sum(free)
    return lost


@given(
    free=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    cpu=st.integers(-2000, 9000),
    kind=st.sampled_from([0, 1]),
)
def test_fragments_are_what_the_definition_says(free: list[int], cpu: int, kind: int) -> None:
    specs = ("1", "0.3", "0.81", "4", "T4", "T4:0.5")
    pricing = price(
        [(Requirements(gpu=gpu.parse(s), cpu_milli=1000 * i), 9 - i) for i, s in enumerate(specs)]
    )
    target = FragmentationTarget(pricing)
    nodes = [a_node(1, 8, 8), a_node(2, 8, ("Tesla T4",) * 8)]
    for node in nodes:
        target.add_kind(node)
    mix = target.mix_of(tuple(free))
    both, total = (mix.fits[None], mix.rests[None]), np.array([sum(free)])
    found = target.fragments(np.array([kind + 1]), np.array([cpu]), both, total)
    assert found[0] == fragments_by_definition(nodes[kind], cpu, free, pricing)
    assert found[0] == target.fragments_of(kind + 1, target.step_of(cpu), mix)


def test_gpus_without_cpu_or_memory_beside_them_are_stranded() -> None:
    usual = Requirements(gpu=gpu.parse("1"), cpu_milli=8000, memory_bytes=16 * GIB)
    target = FragmentationTarget(price([(usual, 1)]))

    def stranded(cpus: int, gigabytes: int) -> int:
        one = np.array([4000])
        return int(target.stranded(np.array([cpus * 1000]), np.array([gigabytes * GIB]), one)[0])

    assert stranded(32, 64) == 0
    assert stranded(16, 64) == 2000
    assert stranded(32, 16) == 3000
    assert stranded(-1, 16) >= 4000


# ---- where tasks go


def test_a_slice_goes_where_its_rest_is_of_use() -> None:
    """0.5 beside another 0.5, not into a GPU with 0.81 free, which a task of 0.81 would fill."""
    mix = priced([wanting("0.81")] * 10 + [wanting("0.5")] * 10 + [wanting("0.19")])
    policy = Policy(order="fcfs", pricing=mix)
    state = a_state(a_node(1, 64, 2))
    for number, spec in enumerate(("0.19", "0.5", "0.5", "0.81")):
        enqueue(state, wanting(spec), [number + 1])
        assert apply(state, plan(state, NOW, policy)) == [number + 1]


def test_tasks_that_need_much_cpu_go_where_there_is_much_of_it() -> None:
    usual = wanting("1", cpu_milli=8000)
    heavy = wanting("1", cpu_milli=24_000)
    pricing = priced([usual] * 9 + [heavy])
    state = a_state(a_node(1, 64, 8), a_node(2, 96, 2))
    enqueue(state, heavy, [1])
    assert plan(state, NOW, Policy(pricing=pricing)).places[0].node == 2


def test_cpu_tasks_leave_the_cpu_that_gpus_will_need() -> None:
    pricing = priced([wanting("1", cpu_milli=8000)] * 10)
    state = a_state(a_node(1, 64, 8), a_node(2, 96, 8))
    enqueue(state, a_shape(cpu_milli=8000), range(1, 5))
    places = plan(state, NOW, Policy(order="fcfs", pricing=pricing)).places
    assert [place.node for place in places] == [2, 2, 2, 2]


# ---- the portfolio

CPU_POOR = [a_node(n, 96, 8) for n in range(1, 13)]
CPU_RICH = [a_node(n, 104, 2) for n in range(13, 23)]


def a_days_work(seed: int, count: int = 600) -> list[Shape]:
    """A mix like openb's: a third slices, many CPU tasks, some that need whole nodes."""
    random = Random(seed)
    kinds = [
        (30, wanting("1", cpu_milli=8000)),
        (8, wanting("1", cpu_milli=16_000)),
        (12, wanting("0.81", cpu_milli=6000)),
        (8, wanting("0.47", cpu_milli=8000)),
        (4, wanting("0.32", cpu_milli=4000)),
        (2, wanting("0.19", cpu_milli=2000)),
        (2, wanting("8", cpu_milli=64_000)),
        (2, wanting("4", cpu_milli=32_000)),
        (12, a_shape(cpu_milli=8000)),
    ]
    return random.choices([s for _, s in kinds], [weight for weight, _ in kinds], k=count)


def test_pricing_leaves_fewer_gpus_idle_than_the_gradient_alone_or_best_fit() -> None:
    idle = []
    for weights in WAYS:
        pricing = priced(a_days_work(1), weights)  # learnt from another day
        runs = [unallocated_pct(CPU_POOR + CPU_RICH, a_days_work(seed), pricing) for seed in (2, 3)]
        idle.append(sum(runs) / len(runs))
    assert idle[0] <= min(idle[1:]) + 0.3
    assert idle[0] < idle[3]


def test_a_pool_without_a_past_prices_as_usual() -> None:
    assert choose(CPU_POOR, a_days_work(1)[: LEAST_ARRIVALS - 1]) is USUAL
