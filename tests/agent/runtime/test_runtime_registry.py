"""The registry makes what this machine can run, in order of preference, and says why the rest is missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpool.agent.runtime.docker.runtime import DockerRuntime
from gpool.agent.runtime.protocol import Runtime, SandboxFailed
from gpool.agent.runtime.registry import (
    BUILT_IN,
    GROUP,
    RuntimeContext,
    RuntimeKind,
    installed,
    known,
    make_all,
)
from gpool.core.model import Tier
from gpool.testing.fake_runtime import FakeRuntime


@dataclass
class Switches:
    """The agent's settings, as far as runtimes read them."""

    data_dir: Path
    docker: bool = False
    microvm: bool = False
    allow_process: bool = False


def made(context: RuntimeContext) -> Runtime:
    return FakeRuntime(context.data_dir)


def refused(context: RuntimeContext) -> Runtime:
    raise SandboxFailed(f"no room in {context.data_dir.name}")


FAKE = RuntimeKind("fake", Tier.CONTAINER, made)
EXAMPLE = RuntimeKind("example", Tier.VM, made)


@pytest.fixture
def context(tmp_path: Path) -> RuntimeContext:
    return RuntimeContext(Switches(tmp_path))


def test_every_runtime_is_registered_by_its_own_name_and_tier() -> None:
    names = {kind.name: kind.tier for kind in BUILT_IN}
    assert names["docker"] is DockerRuntime.tier
    assert list(names) == ["bubblewrap", DockerRuntime.name, "microvm", "process"]
    assert [kind.name for kind in BUILT_IN if kind.required] == ["bubblewrap"]


def test_what_the_owner_did_not_switch_on_is_unavailable(context: RuntimeContext) -> None:
    reasons = {kind.name: kind.unavailable(context) for kind in BUILT_IN}
    assert reasons["bubblewrap"] is None
    assert all(reasons[name] for name in ("docker", "microvm", "process"))


def test_one_that_is_unavailable_or_fails_is_left_out_with_its_reason(
    context: RuntimeContext,
) -> None:
    absent = RuntimeKind("absent", Tier.VM, made, lambda _context: "no such device")
    broken = RuntimeKind("broken", Tier.VM, refused)
    with capture_logs() as logs:
        runtimes = make_all(context, (absent, FAKE, broken))
    assert [one.name for one in runtimes] == ["fake"]
    told = {entry["runtime"]: entry["why"] for entry in logs}
    assert told == {"absent": "no such device", "broken": f"no room in {context.data_dir.name}"}


def test_without_a_required_one_nothing_is_made(context: RuntimeContext) -> None:
    with pytest.raises(SandboxFailed, match="no room"):
        make_all(context, (FAKE, RuntimeKind("broken", Tier.VM, refused, required=True)))


def test_no_runtime_claims_an_ability_it_lacks(context: RuntimeContext) -> None:
    """Every optional ability of a plain runtime has an explicit value."""
    runtime = make_all(context, (FAKE,))[0]
    assert runtime.containers == ()
    assert runtime.build_runtime() is None


def test_an_installed_package_adds_a_runtime_by_an_entry_point() -> None:
    entry = EntryPoint("example", f"{__name__}:EXAMPLE", GROUP)
    assert tuple(installed([entry])) == (EXAMPLE,)
    assert known() == (*BUILT_IN, *installed(entry_points(group=GROUP)))


@pytest.mark.parametrize(
    "value", ["no_such_module_here:KIND", f"{__name__}:absent", f"{__name__}:made"]
)
def test_an_entry_point_that_does_not_load_leaves_the_others(value: str) -> None:
    entries = [EntryPoint("bad", value, GROUP), EntryPoint("example", f"{__name__}:EXAMPLE", GROUP)]
    with capture_logs() as logs:
        assert tuple(installed(entries)) == (EXAMPLE,)
    assert [entry["runtime"] for entry in logs] == ["bad"]
