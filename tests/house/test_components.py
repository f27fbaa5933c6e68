"""Whether a missing component excuses a test depends on where it runs."""

from __future__ import annotations

import pytest

from tests.tools import components


def test_a_missing_component_fails_in_ci_and_skips_elsewhere() -> None:
    assert components.must_be_there("postgres", {"CI": "true"})
    assert not components.must_be_there("postgres", {})


def test_what_ci_cannot_install_never_fails_it() -> None:
    assert not components.must_be_there("gpu", {"CI": "true"})


@pytest.mark.parametrize("component", sorted(components.COMPONENTS))
def test_what_is_missing_is_said_in_a_sentence(component: str) -> None:
    reason = components.missing(component)
    assert reason is None or " " in reason


def test_what_the_locks_install_is_there() -> None:
    assert components.missing("bubblewrap") is None
    assert components.missing("postgres") is None
