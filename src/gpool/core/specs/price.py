"""Prices per hour: text in credits (`0.40/h`) to whole micro-credits and back. Never rounds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from gpool.core.errors import Invalid

CREDIT = 1_000_000
"""Micro-credits."""

MAX_PRICE = 1_000_000 * CREDIT


def parse_price(price: str | int | float) -> int:
    """Parse `0.40/h`, `0.40` or `2` to micro-credits per hour."""
    text = str(price).strip().lower().removesuffix("/h").strip()
    try:
        credits = Decimal(text)
    except InvalidOperation:
        raise _wrong(price, "is not a price") from None
    if not credits.is_finite():
        raise _wrong(price, "is not a price")
    if credits < 0:
        raise _wrong(price, "is below zero")
    if credits > MAX_PRICE // CREDIT:  # checked before the multiplication, which could overflow
        raise _wrong(price, f"is more than {MAX_PRICE // CREDIT} credits per hour")
    found = credits * CREDIT
    if found != int(found):
        raise _wrong(price, "is finer than a millionth of a credit")
    return int(found)


def format_price(microcredits: int) -> str:
    whole, rest = divmod(microcredits, CREDIT)
    digits = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{whole}.{digits}/h"


def _wrong(price: object, why: str) -> Invalid:
    return Invalid(f"the price {str(price)[:40]!r} {why}; write credits per hour, like 0.40/h")
