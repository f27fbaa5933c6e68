"""Prices an hour, between what people write (`0.40/h`, in credits) and whole micro-credits. Never rounds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from gpool.core.errors import Invalid

CREDIT = 1_000_000
"""Micro-credits."""

MAX_PRICE = 1_000_000 * CREDIT


def parse(price: str | int | float) -> int:
    """Micro-credits an hour: `0.40/h`, `0.40`, `2`."""
    text = str(price).strip().lower().removesuffix("/h").strip()
    try:
        credits = Decimal(text)
    except InvalidOperation:
        raise _wrong(price, "is no price") from None
    if not credits.is_finite():
        raise _wrong(price, "is no price")
    if credits < 0:
        raise _wrong(price, "is below zero")
    if (
        credits > MAX_PRICE // CREDIT
    ):  # before it is multiplied: what has many digits would overflow
        raise _wrong(price, f"is more than {MAX_PRICE // CREDIT} credits an hour")
    found = credits * CREDIT
    if found != int(found):
        raise _wrong(price, "is finer than a millionth of a credit")
    return int(found)


def told(microcredits: int) -> str:
    """As people write it, with two decimals at least: `0.40/h`."""
    whole, rest = divmod(microcredits, CREDIT)
    digits = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{whole}.{digits}/h"


def _wrong(price: object, why: str) -> Invalid:
    return Invalid(f"the price {str(price)[:40]!r} {why}; write credits an hour, like 0.40/h")
