"""Holders: how Docker's containers get a lane for their network. What is asked of the engine, and what is left: nothing."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime.docker.confinement import ContainerSpec, request
from gpool.agent.runtime.docker.containers import Gvisor
from gpool.agent.runtime.docker.engine import EngineClient, EngineFacts
from gpool.agent.runtime.docker.network import (
    RENEW_FAILED_AFTER_S,
    HostSystem,
    NamespaceHolders,
    empty_image,
    holder_request,
    is_in,
    system_of,
    why_never,
)
from gpool.agent.runtime.docker.runtime import DockerRuntime
from gpool.agent.runtime.protocol import CommandJob, RunnerJob, SandboxFailed, SandboxNetwork
from gpool.core.model import Network
from tests.agent.runtime.container_case import containers_of
from tests.tools.engines import (
    BARE_IMAGE,
    IMAGE,
    PrivateEngine,
    docker_client,
    image_tar,
    import_image,
    shared_engine,
)
from tests.tools.processes import eventually
from tests.tools.runtimes import LIMITS, PATIENCE_S, using, within

LABEL, BOOT = ("pool.gpool.agent", "of-a-test"), ("pool.gpool.boot", "first")
DOCKER = EngineFacts("docker", ("runc",), False, 0, ())
SYSTEM = HostSystem(("usr", "lib"), (("bin", "usr/bin"),))


@pytest.fixture
def lane(require: Callable[[str], None]) -> Iterator[SandboxNetwork]:
    """A network namespace of our own with nothing in it."""
    require("docker")
    require("network namespaces")
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdin is not None
        keeper.stdout.readline()
        held = os.open(f"/proc/{keeper.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        yield SandboxNetwork((held,), "192.0.2.53")
        os.close(held)
        keeper.stdin.close()


@pytest.fixture
def holders(require: Callable[[str], None]) -> Iterator[NamespaceHolders]:
    require("docker")
    engine = EngineClient(shared_engine("docker").address)
    made = NamespaceHolders(engine, LABEL, BOOT)
    yield made
    made.close()
    engine.close()
    assert images_of(shared_engine("docker")) == []
    assert containers_of(shared_engine("docker")) == []


def images_of(engine: PrivateEngine, label: str = "=".join(LABEL)) -> list[str]:
    with docker_client(engine) as api:
        return [one["Id"] for one in api.images(filters={"label": label}, all=True)]


# ---- what is asked of the engine


@pytest.mark.parametrize(
    ("facts", "root", "gvisor", "said"),
    [
        (DOCKER, True, False, ""),
        (replace(DOCKER, kind="podman"), True, False, ""),
        (DOCKER, False, False, "as root"),
        (replace(DOCKER, kind="podman"), False, False, "as root"),
        (DOCKER, True, True, "gVisor"),
        (replace(DOCKER, kind="podman", default_runtime="runsc"), True, False, "gVisor"),
        (replace(DOCKER, first_uid=100_000), True, False, "userns-remap"),
    ],
)
def test_who_can_never_enter_lanes_says_why(
    facts: EngineFacts, root: bool, gvisor: bool, said: str
) -> None:
    found = why_never(facts, root=root, gvisor=gvisor)
    assert said in found
    assert bool(said) == bool(found)


def test_the_host_s_programs_are_shown_as_they_lie(tmp_path: Path) -> None:
    for name in ("usr", "lib", "home", "etc"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    assert system_of(tmp_path) == HostSystem(("lib", "usr"), (("bin", "usr/bin"),))


def test_a_holder_s_image_has_nothing_in_it_but_links() -> None:
    with tarfile.open(fileobj=io.BytesIO(empty_image(SYSTEM))) as tar:
        assert [(one.name, one.issym(), one.linkname) for one in tar] == [("bin", True, "usr/bin")]


def test_a_holder_may_enter_namespaces_and_write_nowhere() -> None:
    body = holder_request("sha256:0", ("nsenter",), {}, SYSTEM, network="/proc/1/fd/3")
    host = body["HostConfig"]
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], ["SYS_ADMIN"])
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert all(mount["ReadOnly"] for mount in host["Mounts"])
    assert {mount["Source"] for mount in host["Mounts"]} == {"/usr", "/lib", "/proc/1/fd/3"}


def test_who_joins_another_brings_no_network_of_its_own() -> None:
    """Docker refuses a host name or name servers beside another container's network."""
    box = ContainerSpec("sha256:0", ("true",), (), 1, LIMITS, (), {}, network="container:abc")
    body = request(box, "{}")
    assert body["HostConfig"]["NetworkMode"] == "container:abc"
    assert "Dns" not in body["HostConfig"]
    assert body["Hostname"] == ""
    alone = request(replace(box, network="none"), "{}")
    assert alone["HostConfig"]["Dns"] == ["127.0.0.1"]
    assert alone["Hostname"] == "sandbox"


# ---- what happens


def test_it_is_tried_before_it_is_offered_and_leaves_nothing(holders: NamespaceHolders) -> None:
    assert holders.why_not() == ""
    assert containers_of(shared_engine("docker")) == []


def test_without_the_program_that_enters_it_is_not_offered(
    require: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("docker")
    monkeypatch.setenv("PATH", str(tmp_path))

    async def offered(runtime: Any) -> frozenset[Network]:
        return frozenset(runtime.networks)

    assert using("docker", tmp_path, offered) == {Network.NONE}


def test_a_holder_is_in_the_lane_and_gone_afterwards(
    holders: NamespaceHolders, lane: SandboxNetwork
) -> None:
    engine = shared_engine("docker")
    with holders.holding(lane) as holder, docker_client(engine) as api:
        pid = api.inspect_container(holder)["State"]["Pid"]
        assert is_in(pid, lane) is True
        assert is_in(os.getpid(), lane) is False
    assert containers_of(engine) == []


@pytest.mark.parametrize("path", [os.devnull, __file__])
def test_a_lane_that_cannot_be_entered_is_the_node_s_fault(
    holders: NamespaceHolders, path: str
) -> None:
    no_namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(
            SandboxFailed, match=r"cannot enter a sandbox network: .*[Ii]nvalid argument"
        ):
            holders.holding(SandboxNetwork((no_namespace,), "")).__enter__()
    finally:
        os.close(no_namespace)


def test_a_container_that_got_another_network_is_refused(
    holders: NamespaceHolders, lane: SandboxNetwork
) -> None:
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    with holders.holding(lane) as holder:
        with pytest.raises(SandboxFailed, match="another network"):
            holders.check(holder, SandboxNetwork((own,), ""))
        holders.check(holder, lane)  # the control
    os.close(own)
    with pytest.raises(SandboxFailed, match="ended"):
        holders.check(holder, lane)
    holders.check(holder, lane, may_be_over=True)  # a task's container may have nothing left to do


class Unwilling(EngineClient):
    """Its engine removes nothing."""

    def remove(self, container: str) -> None:
        raise SandboxFailed(f"cannot remove {container}")


def test_a_holder_that_cannot_be_removed_ends_and_holds_nobody_up(lane: SandboxNetwork) -> None:
    """Whoever joined it runs by then: to fail now would leave that one to nobody."""
    engine = shared_engine("docker")
    unwilling = Unwilling(engine.address)
    holders = NamespaceHolders(unwilling, LABEL, BOOT)
    with holders.holding(lane) as holder:
        pass
    eventually(
        "it has ended",
        lambda: [one["State"] for one in containers_of(engine)] != ["running"],
        PATIENCE_S,
    )
    EngineClient.remove(unwilling, holder)
    holders.close()
    unwilling.close()
    assert containers_of(engine) == []


def test_an_owner_who_clears_away_unused_images_takes_no_lane_away(
    holders: NamespaceHolders, lane: SandboxNetwork
) -> None:
    engine = shared_engine("docker")
    with holders.holding(lane):
        (before,) = images_of(engine)
    with docker_client(engine) as api:
        api.remove_image(before)
    with holders.holding(lane):
        assert before not in images_of(engine)


def test_a_sweep_takes_no_image_that_has_a_name(holders: NamespaceHolders) -> None:
    """Whoever writes our label on an image of theirs gains and loses nothing by it."""
    engine = shared_engine("docker")
    label = "LABEL " + "=".join(LABEL)
    import_image(engine, image_tar(BARE_IMAGE), "gpool-test/labelled:latest", label)
    holders.sweep()
    assert len(images_of(engine)) == 1
    with docker_client(engine) as api:
        api.remove_image("gpool-test/labelled:latest")
    assert images_of(engine) == []


HOLDING = f"""
import os, sys
from gpool.agent.runtime.docker.engine import EngineClient
from gpool.agent.runtime.docker.network import NamespaceHolders
from gpool.agent.runtime.protocol import SandboxNetwork
own = os.open("/proc/self/ns/net", os.O_RDONLY)
with NamespaceHolders(EngineClient(sys.argv[1]), {LABEL}, {BOOT}).holding(SandboxNetwork((own,), "")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_holder_ends_with_the_agent_and_the_next_one_sweeps_it(
    require: Callable[[str], None],
) -> None:
    """Killed in the middle, without a guard."""
    require("docker")
    engine = shared_engine("docker")
    seen = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, engine.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=seen,
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"held\n"
        assert [one["State"] for one in containers_of(engine)] == ["running"]
        agent.kill()
    eventually(
        "it has ended",
        lambda: [one["State"] for one in containers_of(engine)] != ["running"],
        PATIENCE_S,
    )
    door = EngineClient(engine.address)
    for container in door.labelled("=".join(LABEL)):
        door.remove(container)
    assert len(images_of(engine)) == 1
    NamespaceHolders(door, LABEL, BOOT).sweep()
    assert images_of(engine) == []
    door.close()


def test_a_start_into_a_lane_that_is_given_up_leaves_no_container(
    lane: SandboxNetwork, tmp_path: Path
) -> None:
    engine = shared_engine("docker")

    async def work(runtime: Any) -> None:
        job = CommandJob(("sleep", "1000"), (), (), (), LIMITS, network=lane)
        for patience in (0.001, 0.1, 0.3, 0.5, 0.7):
            starting = asyncio.create_task(runtime.start_command(job))
            await asyncio.wait([starting], timeout=patience)
            if starting.cancel():
                await asyncio.wait([starting])
                assert starting.cancelled()
            else:
                await starting.result().remove()
            assert containers_of(engine) == []

    before = set(images_of(engine, LABEL[0]))  # the guard of one that was killed may be at work
    using("docker", tmp_path, work)
    assert set(images_of(engine, LABEL[0])) <= before


def test_gvisor_where_it_works_never_serves_a_lane(
    require: Callable[[str], None], lane: SandboxNetwork, tmp_path: Path
) -> None:
    """Its own network would be no lane; the same runtime takes it for a task without one."""
    require("gvisor")
    engine = shared_engine("docker")

    async def work() -> list[str]:
        runtime = DockerRuntime(
            tmp_path, engine=engine.address, default_image=IMAGE, gvisor=Gvisor.AUTO
        )
        used = []
        try:
            for given in (lane, None):
                job = CommandJob(("sleep", "1000"), (), (), (), LIMITS, network=given)
                sandbox = await runtime.start_command(job)
                with docker_client(engine) as api:
                    (container,) = runtime.containers
                    used.append(api.inspect_container(container)["HostConfig"]["Runtime"])
                await sandbox.kill()
                await sandbox.remove()
        finally:
            await runtime.close()
        return used

    assert within(work()) == ["runc", "runsc"]


def test_an_image_that_starts_nowhere_does_not_cost_the_node_gvisor(
    require: Callable[[str], None], tmp_path: Path
) -> None:
    """Whoever sends it would choose for everybody else under what they run."""
    require("gvisor")
    engine = shared_engine("docker")

    async def work() -> str:
        runtime = DockerRuntime(
            tmp_path, engine=engine.address, default_image=IMAGE, gvisor=Gvisor.AUTO
        )
        try:
            with pytest.raises(SandboxFailed, match="has no python3"):
                await runtime.start_runner(RunnerJob("3.11", (), (), LIMITS, image=BARE_IMAGE))
            sandbox = await runtime.start_command(CommandJob(("sleep", "1000"), (), (), (), LIMITS))
            with docker_client(engine) as api:
                (container,) = runtime.containers
                used = str(api.inspect_container(container)["HostConfig"]["Runtime"])
            await sandbox.kill()
            await sandbox.remove()
        finally:
            await runtime.close()
        return used

    assert within(work()) == "runsc"
    assert containers_of(engine) == []


def test_what_starts_nothing_of_ours_does_not_work(holders: NamespaceHolders) -> None:
    assert holders.start_under("runc")
    assert not holders.start_under("runsc-that-nobody-installed")


PROBING = """
import sys
from pathlib import Path
from gpool.agent.runtime.docker.runtime import DockerRuntime
runtime = DockerRuntime(Path(sys.argv[1]), engine=sys.argv[2])
print(sorted(runtime.networks), flush=True)
sys.stdin.read()
"""


def test_a_killed_agent_leaves_no_image(require: Callable[[str], None], tmp_path: Path) -> None:
    """Tried out, nothing was started: the guard stands all the same."""
    require("docker")
    engine = shared_engine("docker")
    before = set(images_of(engine, LABEL[0]))
    seen = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROBING, str(tmp_path), engine.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=seen,
    ) as agent:
        assert agent.stdout is not None
        assert b"egress" in agent.stdout.readline()
        assert len(set(images_of(engine, LABEL[0])) - before) == 1  # the control
        agent.kill()
    eventually("the image is gone", lambda: set(images_of(engine, LABEL[0])) <= before, PATIENCE_S)


def test_lanes_are_tried_again_once_the_engine_can(
    require: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("docker")
    now = [0.0]

    async def work() -> list[frozenset[Network]]:
        runtime = DockerRuntime(
            tmp_path, engine=shared_engine("docker").address, clock=lambda: now[0]
        )
        try:
            with monkeypatch.context() as without:
                without.setenv("PATH", str(tmp_path))
                found = [runtime.networks]
            found.append(runtime.networks)
            now[0] = RENEW_FAILED_AFTER_S
            found.append(runtime.networks)
            await asyncio.wrap_future(runtime._prober.submit(int))  # behind what is being tried
            found.append(runtime.networks)
            return found
        finally:
            await runtime.close()

    none = frozenset({Network.NONE})
    assert within(work()) == [none, none, none, frozenset({Network.NONE, Network.EGRESS})]
