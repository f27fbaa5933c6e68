"""Parts of a node that its owner installs while the agent runs."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpool.agent.discovery import Discovery, LateEnvironments, LateNetworks, PartMakers
from gpool.agent.environments import Environments, UvBuilder, find_uv
from gpool.agent.environments.building import environment_support
from gpool.agent.environments.interpreters import own_interpreter
from gpool.agent.machine.findings import Finding, Level, environments_finding
from gpool.agent.network.factory import NetworkRequirement
from gpool.agent.network.policy import Egress, EgressPolicy
from gpool.agent.network.root_networks import RootNetworks
from gpool.agent.runtime.protocol import PartFailed, Runtime, SandboxLimits
from gpool.agent.runtime.registry import RuntimeContext, RuntimeKind
from gpool.agent.services import NetworkSupport, NodeServices, machine_offer, refreshed
from gpool.agent.settings import AgentSettings
from gpool.core.model import Network, Offer, Tier
from gpool.core.specs.fields import environment_name, recipe
from gpool.testing.fake_runtime import FakeRuntime

OWN = own_interpreter()


class Opening(FakeRuntime):
    networks = frozenset(Network)


class NoTables(RootNetworks):
    """Changes nothing of this host; what it opens is tested elsewhere."""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return


@dataclass
class Machine:
    """A host on which packages are installed one by one."""

    folder: Path
    installed: set[str] = field(default_factory=set)
    works: bool = True
    tries: int = 0

    def networks(self) -> NetworkSupport:
        self.tries += 1
        if not self.works:
            return NetworkSupport()
        return NetworkSupport(NoTables(EgressPolicy(), "d15c0"), egress=True)

    def environments(self, support: NetworkSupport) -> Environments | None:
        uv = find_uv()
        if not support.egress or uv is None:
            return None
        folder = self.folder / "environments"
        builder = UvBuilder(
            FakeRuntime(self.folder / "values"),
            folder,
            uv,
            environment_support(os.environ, network="").indexes,  # type: ignore[arg-type]
        )
        return Environments(
            folder, builder, interpreters={OWN.minor: OWN}, own=OWN.minor, clock=lambda: 0
        )

    def requirements(self) -> tuple[NetworkRequirement, ...]:
        return (NetworkRequirement("nft", "nft" in self.installed, "apt-get install nftables"),)

    def unavailable(self, _: RuntimeContext) -> str | None:
        return None if "qemu" in self.installed else "there is no QEMU here"


def story(folder: Path) -> tuple[Machine, Discovery, AgentSettings]:
    settings = AgentSettings(
        server_url="https://pool.test",
        node="n-1",
        server_name="pool",
        key_file=folder / "key",
        data_dir=folder,
    )
    (folder / "guests").mkdir()
    machine = Machine(folder)
    kind = RuntimeKind(
        "microvm",
        Tier.VM,
        lambda _: FakeRuntime(folder / "guests", tier=Tier.VM),
        machine.unavailable,
    )
    runtimes: list[Runtime] = [Opening(folder)]
    makers = PartMakers(
        machine.networks,
        machine.environments,
        (kind,),
        RuntimeContext(settings),
        machine.requirements,
    )
    support = NetworkSupport()
    found = Discovery(makers, runtimes, support, LateNetworks(), LateEnvironments())
    return machine, found, settings


def offered(discovery: Discovery, settings: AgentSettings, first: Offer | None = None) -> Offer:
    services = NodeServices(discovery.runtimes, discovery.networks, discovery.environments)
    now = machine_offer(settings, (), services, discovery.support)
    return now if first is None else refreshed(first, now)


def test_what_is_installed_later_is_offered_without_a_restart(tmp_path: Path) -> None:
    machine, discovery, settings = story(tmp_path)

    async def whole() -> None:
        first = offered(discovery, settings)
        assert (first.builds, first.networks) == (frozenset(), frozenset({Network.NONE}))
        await discovery.look()
        assert machine.tries == 0, "nothing was installed: nothing is tried"
        with pytest.raises(PartFailed):
            await discovery.networks.open(Egress())
        machine.installed |= {"nft", "qemu"}
        await discovery.look()
        now = offered(discovery, settings, first)
        assert (now.builds, now.networks) == (frozenset({"pip"}), frozenset(Network))
        assert now.tiers == {Tier.CONTAINER, Tier.VM}
        await discovery.look()
        assert machine.tries == 1
        assert len(discovery.runtimes) == 2
        await discovery.environments.close()

    asyncio.run(whole())


def test_a_package_that_does_not_help_is_not_tried_again_and_again(tmp_path: Path) -> None:
    machine, discovery, _ = story(tmp_path)

    async def whole() -> None:
        machine.installed.add("nft")
        machine.works = False  # the kernel lacks something
        await discovery.look()
        await discovery.look()
        assert (machine.tries, discovery.networks.inner) == (1, None)
        assert discovery.support == NetworkSupport()

    asyncio.run(whole())


def test_without_the_parts_a_task_fails_as_on_a_node_that_does_not_offer_them(
    tmp_path: Path,
) -> None:
    _, discovery, _ = story(tmp_path)
    wanted = recipe(packages=("numpy",))

    async def whole() -> None:
        limits = SandboxLimits(1000, 1 << 30)
        with pytest.raises(PartFailed):
            async with discovery.environments.prepare(
                environment_name(wanted), wanted, print, limits
            ):
                raise AssertionError("there are none")

    asyncio.run(whole())


NO_INDEX = {"HOME": "/nonexistent", "PIP_CONFIG_FILE": os.devnull, "UV_CONFIG_FILE": os.devnull}


def test_packages_are_offered_only_where_an_index_is_in_reach(tmp_path: Path) -> None:
    without = environment_support(NO_INDEX, network="nft is missing")
    assert without.indexes is None
    assert "nft is missing" in without.why
    assert environment_support(NO_INDEX, network="").indexes is not None
    (tmp_path / "simple").mkdir()
    local = {**NO_INDEX, "PIP_INDEX_URL": f"file://{tmp_path}/simple"}
    assert environment_support(local, network="nft is missing").indexes is not None


def test_the_doctor_never_marks_what_is_missing_as_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    for name, value in NO_INDEX.items():
        monkeypatch.setenv(name, value)
    network = Finding("network", Level.NOTE, "without nft …", "apt-get install nftables")
    found = environments_finding("without nft builds have no network", network)
    assert (found.mark, found.fix) == ("note", "apt-get install nftables")
    assert "--pip" in found.text
    assert environments_finding("", Finding("network", Level.OK, "opened")).mark == "ok"
    assert [Finding("x", level, "").mark for level in Level] == ["ok", "note", "warning", "PROBLEM"]
