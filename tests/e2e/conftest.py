"""A real pool of real processes for each test; what it said is shown when the test fails."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from gpool.testing.processes import SHORT_LEASE, Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole pools share two cores badly: one worker runs them one after another."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("e2e"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    pool = getattr(item, "funcargs", {}).get("pool")
    if report.failed and isinstance(pool, Pool):
        report.sections.append(("the pool's logs", pool.story()))
    return report


@pytest.fixture
def pool(tmp_path: Path, require: Callable[[str], None]) -> Iterator[Pool]:
    """A server and one agent, as separate processes with their own homes; leases of two seconds."""
    require("bubblewrap")
    pool = Pool(tmp_path, SHORT_LEASE)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()
