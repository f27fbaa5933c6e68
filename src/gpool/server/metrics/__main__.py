"""`python -m gpool.server.metrics` prints docs/metrics.md."""

from __future__ import annotations

import sys

from gpool.server.metrics.catalogue import page

sys.stdout.write(page())
