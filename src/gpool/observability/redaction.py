"""Removal of secrets from log lines and span attributes: by field name, by form, and by known value.

Every string passes `Redactor.text` once, after formatting. Patterns prefer to remove too much; their repetitions are
bounded, since nodes and tasks supply some of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from urllib.parse import quote

REDACTED = "[redacted]"

SHORTEST_KNOWN = 6
"""Shorter values are not removed wherever they occur: `1` or `yes` would blank every line."""
MOST_KNOWN = 10_000
"""Known values kept; the oldest are dropped."""

_SECRET_WORD = (
    r"(?:passw(?:or)?d|passphrase|secret|token|api[_-]?key|private[_-]?key|access[_-]?key"
    r"|signature|credential|invite|proof)s?"
)
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|[^\s"'&,;)}\]]+)"""
_SECRET_FIELD = re.compile(
    rf"(?:.*[_-])?(?:{_SECRET_WORD}|authorization|cookie|env|environ|variables|key)", re.IGNORECASE
)

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S
        ),
        REDACTED,
    ),
    # Headers, in any spelling of a dictionary or of HTTP.
    (
        re.compile(
            r"((?:proxy-)?authorization|(?:set-)?cookie|x-api-key|gpool-proof)"
            r"(?P<between>[\"']?\s{0,9}[:=,]\s{0,9}(?:b?[\"'])?)(?:(?:bearer|basic|negotiate|dpop)\s{1,9})?[^\s\"',]+",
            re.IGNORECASE,
        ),
        rf"\1\g<between>{REDACTED}",
    ),
    (
        re.compile(r"\b(bearer|basic)\s{1,9}[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
        rf"\1 {REDACTED}",
    ),
    (re.compile(r"\bgp[a-z]_[A-Za-z0-9_-]{8,}"), REDACTED),  # our API keys and invites
    (re.compile(r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)*"), REDACTED),  # JWT
    (re.compile(r"(/join/)[^/\s\"']+"), rf"\1{REDACTED}"),
    (re.compile(r"\b0x[0-9a-fA-F]{64,}"), REDACTED),  # private keys, signatures of wallets
    (
        re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://[^/\s:@\"']{0,256}:)[^/\s@\"']+@", re.I),
        rf"\1{REDACTED}@",
    ),
    (
        re.compile(r"([?&](?:code|state|key|sig|x-amz-[a-z-]+)=)[^&\s\"']+", re.I),
        rf"\1{REDACTED}",
    ),
    # Variables and members: NAME=value, "name": "value", name='value'.
    (
        re.compile(
            rf"({_SECRET_WORD}[\w-]{{0,64}}[\"']?\s{{0,9}}[=:]\s{{0,9}}){_VALUE}", re.IGNORECASE
        ),
        rf"\1{REDACTED}",
    ),
)


def is_secret_name(name: str) -> bool:
    return _SECRET_FIELD.fullmatch(name) is not None


class Redactor:
    """Removes known values and everything that has the form of a secret."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known: dict[str, None] = {}
        self.add(known)

    def add(self, values: Iterable[str]) -> None:
        """Remove these values from now on, also as URLs and `repr` spell them; drop the oldest beyond `MOST_KNOWN`."""
        for value in values:
            if len(value) >= SHORTEST_KNOWN:
                self._known |= dict.fromkeys((value, quote(value, safe=""), repr(value)[1:-1]))
        excess = len(self._known) - MOST_KNOWN
        if excess > 0:
            for value in list(islice(self._known, excess)):
                del self._known[value]

    def text(self, text: str) -> str:
        for value in self._known:
            if value in text:
                text = text.replace(value, REDACTED)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def value(self, name: str, value: object) -> object:
        """Value of a field, with text and the members of containers redacted; other types unchanged."""
        if value is not None and not isinstance(value, bool) and is_secret_name(name):
            return REDACTED
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {str(key): self.value(str(key), each) for key, each in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.value("", each) for each in value]
        if value is None or isinstance(value, (int, float)):
            return value
        return self.text(str(value))
