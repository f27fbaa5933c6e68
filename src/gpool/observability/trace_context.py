"""W3C trace context: the `traceparent` header as a value. Depends on nothing, so that it also passes where no
OpenTelemetry is installed."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

TRACEPARENT = "traceparent"
SANDBOX_VARIABLE = "TRACEPARENT"
"""Variable with which a task's own program continues the trace, as OpenTelemetry's tools read it."""

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class TraceContext(NamedTuple):
    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    flags: int = _SAMPLED

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None unless the text is a valid `traceparent` of version 00."""
        found = _FORM.fullmatch(text)
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(found[1], found[2], int(found[3], 16))

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"
