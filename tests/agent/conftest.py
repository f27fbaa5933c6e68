"""What the agent's tests share: runtimes that need a component say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tools.runtimes import NEEDS


@pytest.fixture(autouse=True)
def _has_its_component(request: pytest.FixtureRequest, require: Callable[[str], None]) -> None:
    """A test over kinds of runtime skips, or in CI fails, for one that cannot be here."""
    if "kind" in request.fixturenames:
        component = NEEDS.get(request.getfixturevalue("kind"))
        if component is not None:
            require(component)
