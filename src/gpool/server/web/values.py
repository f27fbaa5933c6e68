"""How values are written on pages: sizes, spans, times, prices, ids. At most three digits; text of others is cleaned."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from gpool.core.terminal import plain

_GB = 1024**3
_STATES = {
    "free": "free",
    "succeeded": "free",
    "busy": "busy",
    "shared": "busy",
    "running": "busy",
    "leased": "busy",
    "queued": "wait",
    "waiting": "wait",
    "paused": "wait",
    "quarantined": "fail",
    "failed": "fail",
    "offline": "off",
    "cancelled": "off",
}
_VENDORS = re.compile(r"^(NVIDIA|AMD|Intel|Apple)\s+(GeForce\s+|Radeon\s+|Instinct\s+)?")
_VARIANT = re.compile(r"[ -](SXM\d?|PCIe|HBM\d\w*|NVL|\d+GB)\b.*$")


def shown(text: object) -> str:
    """Text of others: no control character, no change of direction; line ends become spaces."""
    return plain(str(text)).replace("\n", " ").replace("\t", " ")


def state(word: str) -> Markup:
    """A state as colour, word and shape."""
    return Markup('<span class="s {}">{}</span>').format(_STATES.get(word, "off"), word)


def memory(size: int | None) -> str:
    """Bytes as GB, in units of GPUs' memory."""
    return "–" if size is None else digits(size / _GB)


def size(count: int | None) -> str:
    if count is None:
        return "–"
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{digits(value)} {unit}"


def digits(value: float) -> str:
    """At most three significant digits."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return text.rstrip("0").rstrip(".")


def span(seconds: float | None) -> str:
    """Two units at most: 2 h 10 m."""
    if seconds is None:
        return "–"
    left = max(0, round(seconds))
    if left < 60:
        return f"{left} s"
    if left < 3600:
        return f"{left // 60} m" + (f" {left % 60} s" if left < 600 and left % 60 else "")
    if left < 86_400:
        return f"{left // 3600} h" + (f" {left % 3600 // 60} m" if left % 3600 >= 60 else "")
    return f"{left // 86_400} d" + (f" {left % 86_400 // 3600} h" if left % 86_400 >= 3600 else "")


def between(first: datetime | None, last: datetime | None) -> str:
    return "–" if first is None or last is None else span((last - first).total_seconds())


def ago(at: datetime | None, now: datetime) -> Markup:
    """Relative time, with the exact one on hover."""
    if at is None:
        return Markup("–")
    seconds = (now - at).total_seconds()
    text = f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"
    exact = at.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at.isoformat(), exact, text)


def clock(at: datetime) -> Markup:
    """Time of day, in the browser's zone where scripts run."""
    exact = at.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}" data-clock>{}</time>').format(
        at.isoformat(), exact, at.strftime("%H:%M UTC")
    )


def credits(micro: int | None) -> str:
    return "–" if micro is None else f"{micro / 1_000_000:,.2f}"


def price(micro: int) -> str:
    return "free" if not micro else f"{digits(micro / 1_000_000)}/h"


def model(name: str) -> str:
    """Model without vendor and variant: H100, RTX 4090."""
    return shown(_VARIANT.sub("", _VENDORS.sub("", name))) or shown(name)


def short(id_: str) -> Markup:
    """An id, shortened, in monospace; a click copies it."""
    text = id_ if len(id_) <= 9 else f"{id_[:2]}…{id_[-6:]}"
    return Markup(
        '<button type="button" class="id" data-copy="{}" title="Copy {}">{}</button>'
    ).format(id_, id_, text)


def lines(text: str) -> Markup:
    return Markup("<br>").join(escape(plain(line)) for line in str(text).splitlines())


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "between": between,
    "clock": clock,
    "credits": credits,
    "digits": digits,
    "gb": memory,
    "lines": lines,
    "model": model,
    "plain": plain,
    "price": price,
    "short": short,
    "shown": shown,
    "size": size,
    "span": span,
    "state": state,
}
