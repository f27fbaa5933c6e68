"""What is read from the chain: ranges of blocks, and logs of a node that lies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpool.core.errors import Unreachable
from gpool.server.deposits.chain import TRANSFER, BlockRange, deposit_of, range_after
from gpool.server.deposits.loop import first_blocks
from gpool.server.deposits.settings import DepositTerms
from gpool.server.settings import Settings
from gpool.server.store.operations.deposits import ChainDeposit

TERMS = DepositTerms("http://x", 1, "0x" + "70" * 20, "0x" + "71" * 20, 12, 0)
WITHIN = BlockRange(10, 20)
SENDER = "aa" * 20
ADDRESS = "0x00000000219ab540356cBB839Cbe05303d7705Fa"
LOG: dict[str, Any] = {
    "address": TERMS.token,
    "topics": [TRANSFER, "0x" + SENDER.rjust(64, "0"), "0x" + ("71" * 20).rjust(64, "0")],
    "data": f"0x{5:064x}",
    "blockNumber": "0xa",
    "blockHash": "0x" + "1" * 64,
    "transactionHash": "0x" + "2" * 64,
    "logIndex": "0x3",
    "removed": False,
}
BLOCKS = st.integers(-1, 2000)


@given(BLOCKS, BLOCKS, st.integers(1, 50), st.integers(1, 100))
def test_only_confirmed_blocks_are_read_each_once_and_in_bounded_ranges(
    scanned: int, head: int, confirmations: int, most: int
) -> None:
    read: list[int] = []
    at = scanned
    while (found := range_after(at, head, confirmations, most)) is not None:
        assert found.last - found.first < most
        read += range(found.first, found.last + 1)
        at = found.last
    assert read == list(range(scanned + 1, head - confirmations + 1))


@given(st.lists(st.integers(10, 20)), st.integers(1, 5))
def test_a_write_has_whole_blocks_and_no_deposit_is_left_out(numbers: list[int], most: int) -> None:
    found = [ChainDeposit("", 0, block, "", "", 1) for block in sorted(numbers)]
    last, rows = first_blocks(found, WITHIN, most)
    assert WITHIN.first <= last <= WITHIN.last
    assert rows == [each for each in found if each.block <= last]
    assert len(rows) <= most or len({each.block for each in rows}) == 1


def test_a_log_is_a_deposit_unless_it_moves_nothing() -> None:
    found = deposit_of(LOG, TERMS, WITHIN)
    assert found == ChainDeposit("0x" + "2" * 64, 3, 10, "0x" + "1" * 64, "0x" + SENDER, 5)
    assert deposit_of({**LOG, "data": f"0x{0:064x}"}, TERMS, WITHIN) is None
    own = [TRANSFER, LOG["topics"][2], LOG["topics"][2]]
    assert deposit_of({**LOG, "topics": own}, TERMS, WITHIN) is None


@pytest.mark.parametrize(
    "change",
    [
        {"address": "0x" + "72" * 20},
        {"topics": [TRANSFER, LOG["topics"][1], LOG["topics"][1]]},
        {"topics": ["0x" + "0" * 64, *LOG["topics"][1:]]},
        {"topics": [TRANSFER, "0x" + "1" * 64, LOG["topics"][2]]},
        {"topics": LOG["topics"][:2]},
        {"topics": None},
        {"blockNumber": "0x9"},
        {"blockNumber": "0x15"},
        {"blockNumber": None},
        {"logIndex": "-1"},
        {"data": "0x"},
        {"data": "0x" + "0" * 65},
        {"transactionHash": "0x12"},
        {"removed": True},
    ],
)
def test_a_log_that_was_not_asked_for_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unreachable, match="the node answered with"):
        deposit_of({**LOG, **change}, TERMS, WITHIN)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"deposit_address": ADDRESS}, "deposits need all of"),
        ({"deposit_token": ADDRESS.lower(), "deposit_address": ADDRESS}, "no checksum"),
    ],
)
def test_the_settings_are_complete_and_have_checksums(settings: dict[str, Any], why: str) -> None:
    more = {"deposit_rpc_url": "http://127.0.0.1:1", "deposit_from_block": 5}
    with pytest.raises(ValidationError, match=why):
        Settings(**settings, **(more if len(settings) > 1 else {}))


def test_the_url_of_the_node_is_not_printed() -> None:
    told = {"deposit_token": ADDRESS, "deposit_address": ADDRESS, "deposit_from_block": 5}
    settings = Settings(deposit_rpc_url="https://node.example/key-7", **told)  # type: ignore[arg-type]
    terms = settings.deposit_terms(1)
    assert terms is not None
    assert terms.rpc_url.endswith("key-7")
    assert "key-7" not in f"{settings!r} {terms!r}"
