"""`python -m gpool.server`: tune the garbage collector and thread switching, then run `main`.

Imported objects stay: collecting among them takes a fifth of the restart time, so collection is off during imports
and they are frozen afterwards. While serving, reference counting frees short-lived objects; collecting after every
700 took a tenth of the time. A switch interval of 1 ms, not 5 ms, lets the store's thread commit during a plan.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

COLLECT_AFTER = 20_000
"""Allocations between two collections of the youngest generation: a few megabytes."""

SWITCH_INTERVAL_S = 0.001
"""How long a thread waits for the interpreter lock before it asks the holder to release it; the default is 5 ms."""

if __name__ == "__main__":
    gc.disable()
    run = import_module("gpool.server.main").main
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    gc.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    run()
