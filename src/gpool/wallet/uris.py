"""RFC 3986 rules `URI` and `authority`, as a sign-in message needs them."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv6Address

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
    """Absolute URI with a scheme; a fragment may follow."""
    found = _URI_RULE.fullmatch(text)
    return found is not None and (found["authority"] is None or is_authority(found["authority"]))


def is_pchars(text: str) -> bool:
    """Characters of one path segment, possibly none."""
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
