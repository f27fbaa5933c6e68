"""Which certificate the server shows: a given one, or its own, made at the first start into its data folder."""

from __future__ import annotations

import platform
import re
from urllib.parse import urlsplit

from gpool.core.model import Instant
from gpool.server.identity.certificates import Certificate, load, own
from gpool.server.settings import Settings

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_EVERYWHERE = frozenset({"0.0.0.0", "::", ""})


def certificate_of(settings: Settings, now: Instant) -> Certificate | None:
    """None: plain HTTP. `Invalid` says what is wrong with a given one."""
    if not settings.uses_tls:
        return None
    if settings.tls_cert is not None and settings.tls_key is not None:
        return load(settings.tls_cert, settings.tls_key)
    return own(settings.data, _names(settings), now)


def _names(settings: Settings) -> list[str]:
    """Clients pin the certificate and ask for no name; browsers like to find one."""
    named = (settings.host, urlsplit(settings.public_url or "").hostname or "", platform.node())
    found = [name for name in named if name not in _EVERYWHERE and _is_name(name)]
    return list(dict.fromkeys((*found, "localhost", "127.0.0.1", "::1")))


def _is_name(text: str) -> bool:
    return ":" in text or _HOST.fullmatch(text) is not None
