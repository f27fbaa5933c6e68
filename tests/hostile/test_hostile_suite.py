"""What strangers' code tries, inside every runtime that is here; and the same without the defence, where it must succeed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.hostile import suite

AT_LEAST_ATTACKS, AT_LEAST_SECRETS, AT_LEAST_OUTPUTS = 150, 50, 80
SECONDS_AN_OUTPUT = 44.0  # a lease would be 45
SECONDS_FROM_A_GUEST = 200.0  # ten thousand files from an emulated one
pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def column(request: pytest.FixtureRequest, require: Callable[[str], None]) -> str:
    name = str(request.param)
    absent = suite.why_not(suite.COLUMNS[name])
    if absent is not None:
        require(absent)
    return name


every = pytest.mark.parametrize("column", list(suite.COLUMNS), indirect=True)
with_control = pytest.mark.parametrize("column", list(suite.CONTROLS), indirect=True)
at_control = pytest.mark.parametrize("column", [suite.CONTROL], indirect=True)


@every
def test_no_attack_ever_gets_through(column: str) -> None:
    found = suite.verdicts(column)
    assert len(found) >= AT_LEAST_ATTACKS
    assert {
        n: became for n, became in found.items() if became not in ("refused", "own kernel")
    } == {}
    assert (suite.stage(column)["uid"] == 0) is suite.COLUMNS[column].root


@every
def test_no_planted_secret_is_ever_found(column: str) -> None:
    assert len(suite.stage(column)["words"]) >= AT_LEAST_SECRETS
    assert suite.found(column) == []


@every
def test_the_host_is_as_it_was(column: str) -> None:
    whole = suite.stage(column)
    assert whole["changes"] == []
    assert suite.of(column)["left_over"] == []
    before, after = whole["descriptors"]
    assert after <= before


@every
def test_hostile_outputs_are_refused_or_taken_as_plain_bytes(column: str) -> None:
    said = suite.of(column)
    assert len(said["left"]["took"]) + len(said["deep"]["took"]) >= AT_LEAST_OUTPUTS
    assert suite.wrong_outputs(column) == []


@every
def test_no_output_ever_blocks_the_collector(column: str) -> None:
    slowest_s, name = suite.slowest_output(column)
    bound_s = SECONDS_FROM_A_GUEST if column == "microvm" else SECONDS_AN_OUTPUT
    assert slowest_s < bound_s, name


@with_control
def test_the_same_crawler_outside_finds_every_secret(column: str) -> None:
    assert suite.missed(column) == []


@at_control
def test_every_attack_succeeds_without_the_defence(
    column: str, require: Callable[[str], None]
) -> None:
    require("qemu")
    dead = {name for name, where in suite.controls().items() if where not in ("host", "guest")}
    assert dead <= suite.UNPROVED.keys()


@at_control
def test_a_careless_collector_would_have_taken_the_hosts_bytes_or_waited(column: str) -> None:
    met = suite.of(column)["left"]["controls"]
    assert {"link to a host file", "link upwards", "link in the middle"} <= {
        name for name, became in met.items() if became == "host"
    }
    assert {"fifo", "fifo with a writer"} <= {n for n, became in met.items() if became == "blocked"}
    assert met["link to an endless device"] == "endless"


@at_control
def test_what_changes_while_it_is_taken_was_really_met_both_ways(column: str) -> None:
    both = {(one["name"], one["became"]) for one in suite.of(column)["changing"]}
    assert {("file and fifo", "refused"), ("folder and link", "refused")} <= both
    assert ("file under a lease", "refused") in both


@pytest.mark.skipif(os.geteuid() == 0, reason="as root everything runs")
def test_without_root_the_suite_says_so() -> None:
    assert suite.why_not(suite.COLUMNS["bubblewrap"]) == "root"
