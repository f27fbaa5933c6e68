"""Which gpool this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("gpool")
except PackageNotFoundError:  # run from its source, without being installed
    VERSION = "0+source"
