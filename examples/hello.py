"""Run one function in the pool. Start a pool first: `gpool up`."""

from __future__ import annotations

import platform

import gpool


@gpool.task
def greet(name: str) -> str:
    return f"Hello {name}, from Python {platform.python_version()}"


if __name__ == "__main__":
    print(greet.remote("world"))
