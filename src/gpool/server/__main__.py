"""`python -m gpool.server`: imports the server without collecting garbage meanwhile, then runs it.

Nearly everything an import makes stays: looking through it again and again is a fifth of the time until a killed server
is back. Afterwards it is set aside for good, so that no later collection walks through it either. And a server at work makes
thousands of small things a second that go by themselves: looking for circles among every 700 of them took a tenth of its time.
"""

from __future__ import annotations

import gc
from importlib import import_module

COLLECT_AFTER = 20_000
"""New things, some megabytes of them."""

if __name__ == "__main__":
    gc.disable()
    run = import_module("gpool.server.main").main
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    gc.enable()
    run()
