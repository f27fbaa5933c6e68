"""Version of the installed package. Imports nothing of gpool, so that every layer may use it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version that the build took from the git tag; `0+source` for a tree that is not installed."""
    try:
        return version("gpool")
    except PackageNotFoundError:
        return "0+source"
