"""What every test may ask for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.tools import components

# Properties are judged by what they find, not by how busy the machine is. Where CI=true, hypothesis tries the same
# examples in every run; elsewhere always new ones.
settings.register_profile("gpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpool")


@pytest.fixture(scope="session")
def require() -> Callable[[str], None]:
    """`require("postgres")` skips the test where the component is missing, saying why; in CI it fails it."""

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
    """Whether the tests of a file share what the first of them made."""
    return 'scope="module"' in (ROOT / file).read_text()


class TogetherOnOneWorker(LoadScopeScheduling):
    """What would stand in its own way on two workers, or be made twice, is run by one; all else test by test.

    Whole pools share two cores badly. Guests wait for their disks, which the first of them builds.
    Not `--dist loadgroup`: pytest 9.2 has no longer what pytest-xdist 3.8 writes its groups into, and nothing is said.
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
    return TogetherOnOneWorker(config, log)


def pytest_sessionfinish() -> None:
    """Container engines that tests shared end with their session."""
    if engines := sys.modules.get("tests.tools.engines"):
        engines.end_shared()
