"""A local EVM for the tests of deposits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.tools.chain import LocalChain, local_chain


@pytest.fixture(scope="module")
def chain(require: Callable[[str], None]) -> Iterator[LocalChain]:
    require("anvil")
    with local_chain() as found:
        yield found
