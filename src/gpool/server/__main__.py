"""`python -m gpool.server`: tune the garbage collector and the thread switching, then run `main`.

Nearly all objects created by imports stay: collecting among them takes a fifth of the restart time, so collection is
off during imports and the objects are frozen afterwards. While serving, thousands of short-lived objects a second are
freed by reference counting; collecting after every 700 of them took a tenth of the time.

While the event loop plans, the store's thread needs the interpreter after each statement. With a switch interval of
1 ms instead of 5 ms, a group of writes is committed during a plan and not after it.
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
