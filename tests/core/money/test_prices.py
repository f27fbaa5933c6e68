"""Texts of prices, and offers as one consumer sees them: every GPU that could be used is counted once, at its price."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.ids import UserId
from gpool.core.model import GIB, Audience, Gpu, Merit, Node, Requirements, Shape
from gpool.core.money.offers import OfferFilter, OfferTable, tflops_per_credit
from gpool.core.money.prices import (
    AskedPrices,
    format_credits,
    gpu_hour,
    is_free_for,
    node_hour,
    parse_credits,
    parse_prices,
)
from gpool.core.scheduler.place.fit import usable
from gpool.core.scheduler.state.capacity import Room
from gpool.core.specs import gpu as gpuspec
from tests.core.scheduler.state.builders import a_node, a_shape

CREDIT = 1_000_000


def test_the_narrowest_price_applies() -> None:
    asked = parse_prices(" 0.31/h, RTX 4090 = 0.5/h ,gpu1=0/h")
    assert asked == AskedPrices(310_000, (("RTX4090", 500_000),), ((1, 0),))
    names = ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "NVIDIA H100")
    gpus = [Gpu(n, f"g{n}", name, "nvidia", GIB) for n, name in enumerate(names)]
    assert [asked.of_gpu(gpu) for gpu in gpus] == [500_000, 0, None]
    assert parse_prices("H100=2/h") == AskedPrices(0, (("H100", 2 * CREDIT),))
    assert parse_prices(0) == AskedPrices()


@pytest.mark.parametrize(
    "text",
    ["", "x", "1/h,2/h", "=1/h", "gpu0=1/h,GPU0=2/h", "a=1/h,A=2/h", "gpu0=-1/h", "1/h," * 200],
)
def test_a_text_that_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_prices(text)


@given(st.integers(0, 10**9))
def test_an_amount_is_read_as_it_is_written(amount: int) -> None:
    assert parse_credits(format_credits(amount)) == amount


@pytest.mark.parametrize("text", ["-1", "1/h", "0.0000001", "1001", "nan", "much"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="credits"):
        parse_credits(text)


NODES = st.lists(
    st.tuples(
        st.integers(0, 3),  # owner
        st.sampled_from((0, 100, 200)),  # price of the node
        st.lists(
            st.tuples(
                st.sampled_from(("Tesla T4", "NVIDIA A10G")), st.sampled_from((None, 0, 300))
            ),
            max_size=3,
        ),
        st.sampled_from((None, 1, 2)),  # for whom it is free
        st.booleans(),  # closed
    ),
    max_size=6,
)


def lent(
    number: int, drawn: tuple[int, int, list[tuple[str, int | None]], int | None, bool]
) -> Node:
    owner, price, cards, free, is_closed = drawn
    node = a_node(number, 8, tuple(model for model, _ in cards))
    gpus = tuple(
        replace(gpu, price_microcredits=own)
        for gpu, (_, own) in zip(node.offer.gpus, cards, strict=True)
    )
    closed = "outside its hours" if is_closed else ""
    offer = replace(node.offer, gpus=gpus, price_microcredits=price, closed=closed)
    named = None if free is None else Audience(frozenset({free}))
    return replace(node, offer=offer, owner=UserId(owner), free_for=named)


@given(NODES, st.integers(0, 3), st.sampled_from((None, 0, 150)), st.sampled_from(("1", "T4", "2")))
def test_every_gpu_that_could_be_used_is_offered_once_at_its_price(
    drawn: list[tuple[int, int, list[tuple[str, int | None]], int | None, bool]],
    user: int,
    cap: int | None,
    spec: str,
) -> None:
    nodes = [lent(number, each) for number, each in enumerate(drawn, 1)]
    shape = a_shape(user, gpu=gpuspec.parse(spec), cpu_milli=0, max_price_microcredits=cap)
    [request] = shape.requirements.gpu
    table = OfferTable([shape], OfferFilter())
    expected: dict[tuple[int, str], int] = {}
    for node in nodes:
        table.add(node, Room(node))
        able = [gpu for gpu in node.offer.gpus if usable(node, gpu, request, cap, shape)]
        if node.offer.closed or len(able) < request.count:
            continue
        for gpu in able:
            price = 0 if is_free_for(node, shape.user, None) else gpu_hour(node, gpu)
            assert cap is None or request.count * price <= cap
            expected[price, gpu.model] = expected.get((price, gpu.model), 0) + 1
    found = table.page(None, 1000)
    assert {key[:2]: group.gpus for key, group in found} == expected
    assert [key for key, _ in found] == sorted(key for key, _ in found)
    assert all(group.free == group.gpus for _, group in found)
    for place, (key, _) in enumerate(found):
        assert table.page(key, 1000) == found[place + 1 :]


def test_the_bounds_of_a_group_are_those_of_its_least_node() -> None:
    shape = Shape(
        UserId(9), Requirements(gpu=gpuspec.parse("1")), 0, a_shape(9).kind, "default", ""
    )
    table = OfferTable([shape], OfferFilter())
    for number, (gigaflops, notice) in enumerate(((100_000, 600), (0, 60), (400_000, 0))):
        node = a_node(number + 1, 8, 1, merit=Merit(gigaflops=gigaflops))
        terms = {"notice_s": notice, "min_charge_microcredits": notice}
        table.add(replace(node, offer=replace(node.offer, **terms)), Room(node))  # type: ignore[arg-type]
    [(_, group)] = table.page(None, 10)
    assert (group.gigaflops, group.notice_s, group.min_charge_microcredits) == (0, 0, 600)
    assert (group.nodes, group.gpus) == (3, 3)


def test_speed_per_credit_is_unknown_without_a_price_or_a_measurement() -> None:
    assert tflops_per_credit(500_000, 2 * CREDIT) == 250.0
    assert tflops_per_credit(500_000, 0) is None
    assert tflops_per_credit(0, CREDIT) is None
    wanted = OfferFilter(min_tflops_per_credit=100.0)
    node = a_node(1, 8, 1, merit=Merit(gigaflops=500_000))
    assert wanted.accepts(node, 5 * CREDIT)
    assert not wanted.accepts(node, 6 * CREDIT)
    assert wanted.accepts(node, 0)  # free
    assert not wanted.accepts(a_node(1, 8, 1), 0)  # not measured


def test_the_price_of_a_node_is_that_of_its_gpus() -> None:
    node = lent(1, (0, 100, [("Tesla T4", None), ("Tesla T4", 300)], None, False))
    assert node_hour(node) == 400
    assert node_hour(lent(1, (0, 100, [], None, False))) == 100
