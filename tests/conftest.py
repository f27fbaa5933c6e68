"""Fixtures and scheduling shared by all tests."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.tools import components

pytest_plugins = ("tests.host_speed", "tests.leftovers")

# No deadlines: a property is judged by its result, not by the host's load. With CI=true hypothesis
# derandomizes; `make soak` explores with fresh seeds, also in CI.
NO_DEADLINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gpool", NO_DEADLINE)
settings.register_profile(
    "soak", NO_DEADLINE, derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile("soak" if os.environ.get("GPOOL_SOAK") else "gpool")


@pytest.fixture(scope="session")
def require() -> Callable[[str], None]:
    """Return `require(component)`: skips the test with the reason if it is missing; fails it in CI."""

    def check(component: str) -> None:
        reason = components.missing(component)
        if reason is None:
            return
        if components.must_be_there(component):
            pytest.fail(f"{component} must be there in CI: {reason}", pytrace=False)
        pytest.skip(reason)

    return check


ROOT = Path(__file__).parents[1]


@functools.cache
def shares(file: str) -> bool:
    """Return whether the tests of a file share module-scoped fixtures."""
    return 'scope="module"' in (ROOT / file).read_text()


class SharedFixtureScheduling(LoadScopeScheduling):
    """Run tests that share fixtures, pools or guest disks on one worker; all others one by one.

    Not `--dist loadgroup`: pytest 9.2 lacks the attribute that pytest-xdist 3.8 writes its groups
    into, so the groups are ignored without a warning.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith("tests/e2e/"):
            return "pools"
        if "microvm" in nodeid:
            return "guests"
        return file if shares(file) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return SharedFixtureScheduling(config, log)


def pytest_sessionfinish() -> None:
    """Stop container engines shared by the tests of this process."""
    if engines := sys.modules.get("tests.tools.engines"):
        engines.end_shared()
