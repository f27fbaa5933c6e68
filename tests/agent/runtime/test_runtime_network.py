"""A sandbox in a lane: it has that network and no other, and asks the lane's name server."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.runtime.protocol import (
    CommandJob,
    RunnerJob,
    RuntimeAbility,
    SandboxFailed,
    SandboxNetwork,
)
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.core.model import Network
from tests.tools import unprivileged
from tests.tools.runtimes import LIMITS, Caller, command, using

ADDRESS = "198.51.100.7"
KINDS = ("bubblewrap", "docker", "podman")
kinds = pytest.mark.parametrize("kind", KINDS)
SOURCES = "grep hosts /etc/nsswitch.conf"  # an image's own are not ours to write
LOOK = """
cat /etc/resolv.conf
python -c "
import socket
try:
    socket.create_server(('198.51.100.7', 0))
    print('there')
except OSError:
    print('absent')
"
"""


@pytest.fixture
def lane(require: Callable[[str], None]) -> Iterator[SandboxNetwork]:
    require("network namespaces")
    name = f"gpool-{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for words in ("link set lo up", f"addr add {ADDRESS}/32 dev lo"):
            subprocess.run(["ip", "-n", name, *words.split()], check=True)
        held = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        yield SandboxNetwork((held,), ADDRESS)
        os.fstat(held)  # it stayed ours
        os.close(held)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


async def looked(runtime: Any, lane: SandboxNetwork | None, script: str = LOOK) -> list[str]:
    sandbox = await runtime.start_command(
        CommandJob(("sh", "-c", script), (), (), (), LIMITS, network=lane)
    )
    text = b"".join([data async for _, data in sandbox.output()])
    await sandbox.remove()
    return text.decode().splitlines()


@kinds
def test_a_sandbox_in_a_lane_has_its_network_and_its_resolver(
    kind: str, lane: SandboxNetwork, tmp_path: Path
) -> None:
    found = using(kind, tmp_path, lambda runtime: looked(runtime, lane))
    assert found == [f"nameserver {ADDRESS}", "there"]


@kinds
def test_a_sandbox_without_a_lane_has_neither(
    kind: str, lane: SandboxNetwork, tmp_path: Path
) -> None:
    del lane
    found = using(kind, tmp_path, lambda runtime: looked(runtime, None))
    assert "absent" in found  # somewhere: what it says of a missing file is on another stream
    assert ADDRESS not in "".join(found)


def test_a_sandbox_asks_for_names_only_in_a_lane(lane: SandboxNetwork, tmp_path: Path) -> None:
    async def both(runtime: Any) -> list[list[str]]:
        return [await looked(runtime, given, SOURCES) for given in (lane, None)]

    assert using("bubblewrap", tmp_path, both) == [["hosts: files dns"], ["hosts: files"]]


@kinds
def test_a_runner_in_a_lane_has_its_network(
    kind: str, lane: SandboxNetwork, tmp_path: Path
) -> None:
    def serve() -> str:
        with socket.create_server(("198.51.100.7", 0)) as server:
            return str(server.getsockname()[0])

    async def work(runtime: Any) -> Any:
        job = RunnerJob(PYTHON, (), (), LIMITS, network=lane)
        runner = await runtime.start_runner(job)
        answer = await Caller(runner).call(serve)
        await runner.remove()
        return answer

    answer = using(kind, tmp_path, work)
    assert (answer.raised, ADDRESS.encode() in answer.value) == (False, True)


def test_a_lane_gives_no_rights_over_its_network(lane: SandboxNetwork, tmp_path: Path) -> None:
    """The control is the same order given by the lane's owner."""
    order = ("ip", "link", "set", "lo", "mtu", "1400")

    async def work(runtime: Any) -> bytes:
        job = CommandJob(order, (), (), (), LIMITS, network=lane)
        sandbox = await runtime.start_command(job)
        text = b"".join([data async for _, data in sandbox.output()])
        assert (await sandbox.ended()).exit_code != 0
        await sandbox.remove()
        return text

    assert using("bubblewrap", tmp_path, work)
    entered = f"--net=/proc/self/fd/{lane.namespaces[0]}"
    subprocess.run(["nsenter", entered, *order], pass_fds=lane.namespaces, check=True)


ASK = """
cat /etc/hosts
python -c "
import socket
try:
    print(socket.gethostbyname('sandbox'), socket.gethostname())
except OSError as unknown:
    print('unknown')
try:
    print([name for _, name in socket.if_nameindex()])
except OSError as refused:
    print('refused')
"
"""


@kinds
def test_every_sandbox_knows_its_name_and_lists_its_interfaces(
    kind: str, lane: SandboxNetwork, tmp_path: Path
) -> None:
    """NCCL, gloo, dask and psutil do both; in a gang the name is the member's address."""

    async def asked(runtime: Any, lane: SandboxNetwork | None) -> list[str]:
        job = CommandJob(("sh", "-c", ASK), (), (), (), LIMITS, network=lane)
        sandbox = await runtime.start_command(job)
        text = b"".join([data async for _, data in sandbox.output()])
        await sandbox.remove()
        return text.decode().splitlines()[2:]

    gangs = replace(lane, hosts="10.211.0.1 rank0 sandbox\n")
    assert using(kind, tmp_path, lambda runtime: asked(runtime, gangs)) == [
        "10.211.0.1 rank0 sandbox",
        "10.211.0.1 sandbox",
        "['lo']",
    ]
    alone = ["127.0.0.1 sandbox", "127.0.0.1 sandbox", "['lo']"]
    for given in (lane, None):
        assert using(kind, tmp_path, lambda runtime, at=given: asked(runtime, at)) == alone


def test_a_server_on_loopback_is_reached_by_its_hosts_name(tmp_path: Path) -> None:
    script = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection((socket.gethostname(), server.getsockname()[1])).close()
print("reached")
"""
    ran = using("bubblewrap", tmp_path, lambda runtime: command(runtime, "python", "-c", script))
    assert ran.out == b"reached\n", ran.err


def test_a_namespace_that_cannot_be_entered_is_the_nodes_fault(tmp_path: Path) -> None:
    no_namespace = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    async def work(runtime: Any) -> Any:
        lane = SandboxNetwork((no_namespace,), ADDRESS)
        sandbox = await runtime.start_command(
            CommandJob(("true",), (), (), (), LIMITS, network=lane)
        )
        assert [data async for _, data in sandbox.output()]
        ended = await sandbox.ended()
        await sandbox.remove()
        return ended

    ended = using("bubblewrap", tmp_path, work)
    os.close(no_namespace)
    assert ended.reason.value == "sandbox_failed"


def test_without_isolation_a_lane_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed):
        using("process", tmp_path, lambda runtime: looked(runtime, SandboxNetwork((), ADDRESS)))


ROOTLESS = f"""
import asyncio, os, subprocess, sys
from pathlib import Path
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import CommandJob, SandboxNetwork
from tests.tools.runtimes import LIMITS

script = "ip link set lo up; ip addr add {ADDRESS}/32 dev lo; echo up; exec sleep 600"
opener = subprocess.Popen(["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script], stdout=-1)
assert opener.stdout.readline() == b"up\\n"
namespaces = tuple(os.open(f"/proc/{{opener.pid}}/ns/{{kind}}", os.O_RDONLY) for kind in ("user", "net"))

async def main():
    runtime = BubblewrapRuntime(Path(sys.argv[1]))
    for lane in (SandboxNetwork(namespaces, "{ADDRESS}"), None):
        job = CommandJob(("sh", "-c", sys.argv[2] + "ip link set lo mtu 1400 2>/dev/null || echo refused"), (), (), (), LIMITS, network=lane)
        sandbox = await runtime.start_command(job)
        async for _, data in sandbox.output():
            os.write(1, data)
        await sandbox.remove()
    await runtime.close()

asyncio.run(main())
opener.kill()
opener.wait()
"""


def test_an_unprivileged_agents_sandbox_enters_its_lane(require: Callable[[str], None]) -> None:
    require("network namespaces")
    said = unprivileged.run(ROOTLESS, f"{LOOK}{SOURCES}\n").splitlines()
    assert said[:4] == [f"nameserver {ADDRESS}", "there", "hosts: files dns", "refused"]
    assert said[4:] == ["absent", "hosts: files", "refused"]


SERVES = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        line, peer = server.accept()
        line.sendall(peer[0].encode())
        line.close()
"""
DIALS = """
import os, socket, sys
for address in sys.argv[2:]:
    try:
        with socket.create_connection((address, int(sys.argv[1])), 20) as line:
            print(address, "answered", line.recv(100).decode())
    except OSError as refused:
        print(address, type(refused).__name__)
print(open("/etc/resolv.conf").read().strip(), open("/etc/nsswitch.conf").read().split()[-1])
"""


def test_a_guest_in_a_lane_reaches_what_the_lane_reaches_and_no_more(
    lane: SandboxNetwork, tmp_path: Path, require: Callable[[str], None]
) -> None:
    """The control is the same guest without a lane."""
    require("qemu")
    entered = f"--net=/proc/self/fd/{lane.namespaces[0]}"
    words = ["nsenter", entered, sys.executable, "-c", SERVES, ADDRESS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=lane.namespaces) as server:
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()

        async def tried(runtime: Any) -> list[list[str]]:
            assert Network.EGRESS in runtime.networks
            found = []
            for given in (lane, None):
                argv = ("python", "-c", DIALS, port, ADDRESS, "198.51.100.8")
                job = CommandJob(argv, (), (), (), LIMITS, network=given)
                sandbox = await runtime.start_command(job)
                text = b"".join([data async for _, data in sandbox.output()])
                await sandbox.remove()
                found.append(text.decode().splitlines())
            return found

        try:
            inside, outside = using("microvm", tmp_path, tried)
        finally:
            server.kill()
    assert inside[0] == f"{ADDRESS} answered {ADDRESS}"  # the lane's own address, as of a task
    assert "answered" not in inside[1]
    assert inside[2] == "nameserver 10.0.2.3 dns"
    assert outside[0].split()[1] == "OSError"
    assert outside[2].split()[-1] == "files"


def test_a_guest_is_no_member_of_a_gang(lane: SandboxNetwork, tmp_path: Path) -> None:
    async def tried(runtime: Any) -> None:
        assert RuntimeAbility.EGRESS_ONLY in runtime.abilities
        member = replace(lane, hosts="10.1.0.2 rank1\n")
        job = CommandJob(("true",), (), (), (), LIMITS, network=member)
        with pytest.raises(SandboxFailed, match="gang"):
            await runtime.start_command(job)

    using("microvm", tmp_path, tried)
