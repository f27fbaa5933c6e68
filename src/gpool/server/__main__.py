"""`python -m gpool.server`: imports the server without collecting garbage meanwhile, then runs it.

Nearly everything an import makes stays: looking through it again and again is a fifth of the time until a killed server
is back. Afterwards it is set aside for good, so that no later collection walks through it either. And a server at work makes
thousands of small things a second that go by themselves: looking for circles among every 700 of them took a tenth of its time.

While the loop plans, the store's thread wants a turn after each of its statements; Python lets it wait five milliseconds for
each. With one, a group is committed while the plan is made, not behind it.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

COLLECT_AFTER = 20_000
"""New things, some megabytes of them."""

TURN_S = 0.001
"""How long a thread that wants a turn waits for one that has it."""

if __name__ == "__main__":
    gc.disable()
    run = import_module("gpool.server.main").main
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    gc.enable()
    sys.setswitchinterval(TURN_S)
    run()
