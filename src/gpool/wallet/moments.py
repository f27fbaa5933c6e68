"""Formats in a sign-in message: RFC 3339 times in their original spelling, RFC 3986 `URI` and `authority`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import AddressValueError, IPv6Address

from gpool.core.model import Instant
from gpool.wallet.errors import BadMoment, shown

_DATE_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?"
    r"(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Moment:
    """Time and its spelling: signed text must be reproduced exactly."""

    text: str
    at: Instant = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", _instant(self.text))

    @classmethod
    def of(cls, at: Instant) -> Moment:
        """UTC with Z, to the millisecond, or microsecond if there is one."""
        try:
            when = _EPOCH + timedelta(microseconds=at)
        except OverflowError:
            raise BadMoment(f"{at} µs after 1970 is outside the years 1 to 9999") from None
        digits = "microseconds" if at % 1000 else "milliseconds"
        return cls(when.replace(tzinfo=None).isoformat(timespec=digits) + "Z")

    def __str__(self) -> str:
        return self.text


def _instant(text: str) -> Instant:
    found = _DATE_TIME.fullmatch(text)
    if found is None:
        raise BadMoment(
            f"{shown(text)} is not an RFC 3339 time; one looks like 2026-01-31T09:30:00Z"
        )
    year, month, day, hour, minute, second = map(int, found.groups()[:6])
    try:
        when = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError as exc:
        raise BadMoment(f"{shown(text)} is not a valid time: {exc}") from exc
    ahead = 0
    if found[8]:
        hours, minutes = int(found[9]), int(found[10])
        if hours > 23 or minutes > 59:
            raise BadMoment(f"{shown(text)} has an offset past 23:59")
        ahead = (hours * 60 + minutes) * (-60 if found[8] == "-" else 60)
    # Digits past the microsecond are truncated, which only makes a time earlier.
    fraction = int((found[7] or "0")[:6].ljust(6, "0"))
    return Instant((when - _EPOCH) // _MICROSECOND - ahead * 1_000_000 + fraction)


_UNRESERVED = r"A-Za-z0-9\-._~"
_SUB_DELIMS = r"!$&'()*+,;="
_PERCENT = r"%[0-9A-Fa-f]{2}"
_REG = rf"(?:[{_UNRESERVED}{_SUB_DELIMS}]|{_PERCENT})"
_USER = rf"(?:[{_UNRESERVED}{_SUB_DELIMS}:]|{_PERCENT})"
_PCHAR = rf"(?:[{_UNRESERVED}{_SUB_DELIMS}:@]|{_PERCENT})"
_SCHEME = r"[A-Za-z][A-Za-z0-9+\-.]*"
_FUTURE = rf"v[0-9A-Fa-f]+\.[{_UNRESERVED}{_SUB_DELIMS}:]+"

_SCHEME_RULE = re.compile(_SCHEME)
_PCHARS_RULE = re.compile(rf"{_PCHAR}*")
_FUTURE_RULE = re.compile(_FUTURE, re.IGNORECASE)
_AUTHORITY_RULE = re.compile(
    rf"(?:{_USER}*@)?(?P<host>\[(?P<literal>[^\]\[]*)\]|{_REG}*)(?::[0-9]*)?"
)
_URI_RULE = re.compile(
    rf"{_SCHEME}:"
    rf"(?://(?P<authority>[^/?#]*)(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*|)"
    rf"(?:\?(?:{_PCHAR}|[/?])*)?"
    rf"(?:#(?:{_PCHAR}|[/?])*)?"
)


def is_scheme(text: str) -> bool:
    return _SCHEME_RULE.fullmatch(text) is not None


def is_authority(text: str, *, empty_host: bool = True) -> bool:
    """`[userinfo@]host[:port]`; the host may be empty, as in `file:///tmp`."""
    found = _AUTHORITY_RULE.fullmatch(text)
    if found is None or not (empty_host or found["host"]):
        return False
    return found["literal"] is None or _is_literal(found["literal"])


def is_uri(text: str) -> bool:
    """Absolute URI; a fragment may follow."""
    found = _URI_RULE.fullmatch(text)
    return found is not None and (found["authority"] is None or is_authority(found["authority"]))


def is_pchars(text: str) -> bool:
    return _PCHARS_RULE.fullmatch(text) is not None


def scheme_of(uri: str) -> str:
    return uri.partition(":")[0].lower()


def _is_literal(text: str) -> bool:
    if _FUTURE_RULE.fullmatch(text):
        return True
    if "%" in text:  # a zone (RFC 6874) is not in RFC 3986
        return False
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True
