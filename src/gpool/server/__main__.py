"""`python -m gpool.server`: imports the server without collecting garbage meanwhile, then runs it.

Nearly everything an import makes stays: looking through it again and again is a fifth of the time until a killed server
is back. Afterwards it is set aside for good, so that no later collection walks through it either.
"""

from __future__ import annotations

import gc
from importlib import import_module

if __name__ == "__main__":
    gc.disable()
    run = import_module("gpool.server.main").main
    gc.freeze()
    gc.enable()
    run()
