"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpool.testing import components


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
