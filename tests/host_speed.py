"""Pytest plug-in: the marker `host_speed`, and a list of the marked tests for tests/retries.py.

`FOLDERS` start real processes, sandboxes, containers or guests and wait for them: a host that
stands still for seconds can fail such a test. Other tests carry the marker themselves.
"""

from __future__ import annotations

import pytest

FOLDERS = (
    "tests/agent/docker/",
    "tests/agent/environments/",
    "tests/agent/microvm/",
    "tests/agent/network/",
    "tests/agent/runtime/",
    "tests/cli/test_interrupts.py",
    "tests/cli/test_processes.py",
    "tests/e2e/",
    "tests/hostile/",
    "tests/server/replicas/test_two_servers.py",
    "tests/transfer/test_cut_connections.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(FOLDERS):
            item.add_marker("host_speed")
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is not None:
        marked = [item.nodeid for item in items if item.get_closest_marker("host_speed")]
        cache.set("gpool/host_speed", marked)
