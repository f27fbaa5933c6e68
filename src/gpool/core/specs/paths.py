"""Names of input and output files: relative, printable, the same on every machine."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable

from gpool.core.errors import Invalid

MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, bidi marks, surrogates, line separators


def checked(path: str, *, directory: bool = False) -> str:
    """Raises `Invalid` if the path is not safe beneath a work directory."""
    body = path.removesuffix("/") if directory else path
    shown = path[:80].encode("unicode_escape").decode()
    if not body:
        raise Invalid("an empty path; name a file beneath the work directory")
    if body.startswith("/"):
        raise Invalid(f"path '{shown}' is absolute; give it relative to the work directory")
    # isprintable() first: stricter, and 100 times faster for tasks with thousands of files
    if not body.isprintable() and any(unicodedata.category(c) in _INVISIBLE for c in body):
        raise Invalid(f"path '{shown}' contains a control or invisible character")
    encoded = body.encode()
    if len(encoded) > MAX_PATH_BYTES:
        raise Invalid(f"path '{shown}…' is longer than {MAX_PATH_BYTES} bytes")
    for name in body.split("/"):
        if name in ("", ".", ".."):
            raise Invalid(f"path '{shown}' contains {name!r}; use plain names joined by '/'")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise Invalid(f"a name in path '{shown}…' is longer than {MAX_NAME_BYTES} bytes")
    return path


def asked_for(outputs: Iterable[str]) -> Callable[[str], bool]:
    """Predicate: a requested output or beneath a requested directory. A node must not choose where a consumer writes files, so
    other outputs are never fetched.
    """
    names = {name.removesuffix("/") for name in outputs}

    def is_asked_for(path: str) -> bool:
        cuts = (at for at, letter in enumerate(path) if letter == "/")
        return path in names or any(path[:at] in names for at in cuts)

    return is_asked_for


def folded(path: str) -> str:
    """Name on a case-insensitive file system: two outputs must not fold to one."""
    return unicodedata.normalize("NFC", path).casefold()
