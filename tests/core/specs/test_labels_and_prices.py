"""The words owners and consumers share: labels, and prices an hour."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.specs import fields


def test_labels_are_sorted_and_each_is_there_once() -> None:
    assert fields.normal_labels(["zone=a", "ssd", "zone=a", "example.org/rack=7"]) == (
        "example.org/rack=7",
        "ssd",
        "zone=a",
    )


@pytest.mark.parametrize(
    "wrong", ["", "=a", "zone=", "Zone=a", "a b", "a,b", "ssd\n", "x" * 64, "zone=a=b", "-x", "ü"]
)
def test_a_label_that_would_be_misread_is_refused_with_an_example(wrong: str) -> None:
    with pytest.raises(Invalid, match="zone=a"):
        fields.checked_label(wrong)


def test_too_many_labels_are_refused() -> None:
    with pytest.raises(Invalid, match="at most 50"):
        fields.normal_labels(f"l{number}" for number in range(51))


@pytest.mark.parametrize(
    ("written", "microcredits"),
    [
        ("0.40/h", 400_000),
        ("0.4", 400_000),
        (0.4, 400_000),
        (2, 2_000_000),
        (" 1.5 /H ", 1_500_000),
    ],
)
def test_a_price_is_read_as_people_write_it(written: str | float, microcredits: int) -> None:
    assert fields.parse_price(written) == microcredits


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "-0.1/h",
        "0.40/d",
        "free",
        "nan",
        "inf",
        "1e30",
        "1e999999",
        "0.0000001",
        float("nan"),
        "1,5",
    ],
)
def test_a_price_that_is_none_is_refused_with_an_example(wrong: str | float) -> None:
    with pytest.raises(Invalid, match=r"0\.40/h"):
        fields.parse_price(wrong)


@given(st.integers(0, fields.MAX_PRICE))
def test_a_price_that_is_told_is_always_read_back_the_same(microcredits: int) -> None:
    assert fields.parse_price(fields.format_price(microcredits)) == microcredits
