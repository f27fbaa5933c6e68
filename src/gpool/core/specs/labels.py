"""Labels of nodes: set by owners, requested by consumers. One grammar for both."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpool.core.errors import Invalid

MAX_LABELS = 50
MAX_LETTERS = 63
_LABEL = re.compile(r"[a-z0-9][a-z0-9._/-]{0,62}(?:=[A-Za-z0-9._/-]{1,63})?")


def checked(label: str) -> str:
    """Return the label or raise `Invalid`. Examples: `ssd`, `zone=a`, `example.org/rack=7`."""
    if _LABEL.fullmatch(label) is None:
        raise Invalid(
            f"{label[:80]!r} is not a label; write a word like ssd, or name=value like zone=a: the name in lower-case "
            f"letters, digits and . _ / -, each part at most {MAX_LETTERS} letters"
        )
    return label


def normal(labels: Iterable[str]) -> tuple[str, ...]:
    found = tuple(sorted({checked(label) for label in labels}))
    if len(found) > MAX_LABELS:
        raise Invalid(f"there are {len(found)} labels; at most {MAX_LABELS} can be given")
    return found
