"""`python -m gpool.agent`: run the agent with the settings in the `GPOOL_AGENT_*` variables.

Exit codes (DESIGN §7): 1 failed, 2 usage, 3 refused by the server, 4 not found, 5 server unreachable.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from pydantic import ValidationError

from gpool.agent.app import SOURCE, lend
from gpool.agent.runtime.protocol import SandboxFailed
from gpool.core.errors import (
    Forbidden,
    GpoolError,
    Invalid,
    NotFound,
    NotSignedIn,
    TooLarge,
    Unreachable,
)
from gpool.observability.logs import fail

COLLECT_AFTER = 20_000
"""Allocations between two collections of the youngest generation; `gpool.server.__main__` explains it."""

FAILED = 1
USAGE = 2
EXIT_CODES: tuple[tuple[type[GpoolError], int], ...] = (
    (Invalid, 2),
    (TooLarge, 2),
    (NotSignedIn, 3),
    (Forbidden, 3),
    (NotFound, 4),
    (Unreachable, 5),
)


def main() -> None:
    try:
        lend()
    except KeyboardInterrupt:  # before the signal handlers were installed
        sys.exit(128 + signal.SIGINT)
    except ValidationError as error:
        found = ((".".join(map(str, one["loc"])), one["msg"]) for one in error.errors())
        _fail("; ".join(f"GPOOL_AGENT_{name.upper()}: {text}" for name, text in found))
        sys.exit(USAGE)
    except GpoolError as error:
        _fail(error.detail)
        sys.exit(next((code for kind, code in EXIT_CODES if isinstance(error, kind)), FAILED))
    except SandboxFailed as error:
        _fail(
            f"this machine cannot isolate tasks: {error}\n  Find the cause with: gpool node doctor"
        )
        sys.exit(FAILED)


def _fail(text: str) -> None:
    """Replace terminal control characters of the server's text; keep its lines."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    fail(os.environ.get("GPOOL_AGENT_LOG_FORMAT", "text"), SOURCE, shown)


if __name__ == "__main__":
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    main()
