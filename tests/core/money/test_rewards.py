"""Rewards sum to the pool to the micro-credit, and more contribution never earns less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.money.rewards import WHOLE, Contribution, availability_ppm, shares_of, weights_of

HOUR = 3_600_000_000
POOLS = st.integers(0, 10**12)
WEIGHTS = st.dictionaries(
    st.integers(1, 40), st.integers(0, 10**9), min_size=1, max_size=12
).filter(lambda found: any(found.values()))


@given(POOLS, WEIGHTS)
def test_shares_sum_to_the_pool_and_none_is_negative(pool: int, weights: dict[int, int]) -> None:
    shares = shares_of(pool, weights)
    assert sum(shares.values()) == pool
    assert all(share >= 0 for share in shares.values())
    total = sum(weights.values())
    assert all(abs(shares[each] * total - pool * weights[each]) < total for each in weights)


@given(POOLS, WEIGHTS, st.data())
def test_a_larger_weight_never_earns_less(
    pool: int, weights: dict[int, int], data: st.DataObject
) -> None:
    owner = data.draw(st.sampled_from(sorted(weights)))
    more = {**weights, owner: weights[owner] + data.draw(st.integers(1, 10**9))}
    assert shares_of(pool, more)[owner] >= shares_of(pool, weights)[owner]
    shares = shares_of(pool, weights)
    for one in weights:
        for other in weights:
            if weights[one] > weights[other]:
                assert shares[one] >= shares[other]


CONTRIBUTIONS = st.builds(
    Contribution,
    st.integers(0, 10**13),
    st.integers(0, 10**13),
    st.integers(0, 2000),
    st.integers(0, WHOLE),
)


@given(CONTRIBUTIONS, CONTRIBUTIONS)
def test_a_node_that_is_better_in_everything_has_no_lower_weight(
    one: Contribution, more: Contribution
) -> None:
    better = Contribution(
        one.gpu_us + more.gpu_us,
        one.verified_us + more.verified_us,
        one.speed_tflops + more.speed_tflops,
        max(one.availability_ppm, more.availability_ppm),
    )
    assert better.weight() >= one.weight()


def test_a_worked_example() -> None:
    found = weights_of(
        [(1, Contribution(10 * HOUR, 0, 50)), (2, Contribution(10 * HOUR, 10 * HOUR, 50))]
    )
    assert shares_of(100_000_000, found) == {1: 33_333_333, 2: 66_666_667}
    assert availability_ppm(9 * HOUR, 1, HOUR) == 900_000
    assert availability_ppm(0, 0, HOUR) == WHOLE
    with pytest.raises(Invalid, match="nobody contributed"):
        shares_of(1, {})
