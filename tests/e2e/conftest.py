"""A real pool of real processes for each file; what it said is shown when a test fails."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.tools.processes import LONG_LEASE, SHORT_LEASE, Pool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for pool in getattr(item, "funcargs", {}).values():
        if report.failed and isinstance(pool, Pool):
            report.sections.append(("the pool's logs", pool.story()))
    return report


@pytest.fixture(scope="module")
def pool(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], None]
) -> Iterator[Pool]:
    """A server and one agent, as separate processes with their own homes."""
    require("bubblewrap")
    pool = Pool(tmp_path_factory.mktemp("pool"), LONG_LEASE)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


@pytest.fixture
def server_alone(tmp_path: Path) -> Iterator[Pool]:
    """A server whose nodes the test plays itself; they are lost after four seconds' silence."""
    pool = Pool(tmp_path, {**SHORT_LEASE, "GPOOL_SERVER_TTL_S": "4"})
    try:
        pool.start(agents=())
        yield pool
    finally:
        pool.stop()
