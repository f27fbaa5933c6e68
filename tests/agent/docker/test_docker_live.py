"""Containers of real engines: what a task in one can reach, and what the owner's machine is left with."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gpool.agent.runtime.docker.containers import Gvisor
from gpool.agent.runtime.docker.images import DIGEST
from gpool.agent.runtime.docker.runtime import DockerRuntime
from gpool.agent.runtime.protocol import (
    CommandJob,
    FunctionCall,
    RunnerJob,
    SandboxFailed,
    SandboxLimits,
    SandboxNetwork,
)
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.core.model import EndReason, Network
from tests.agent.runtime.container_case import (
    containers_of,
    none_left,
    probe_script,
    run_image,
    undefended,
    verdicts,
)
from tests.agent.runtime.container_probes import NEEDED, PROBES
from tests.tools.engines import (
    BARE_IMAGE,
    IMAGE,
    docker_client,
    image_tar,
    import_image,
    shared_engine,
)
from tests.tools.processes import eventually
from tests.tools.runtimes import (
    LIMITS,
    PATIENCE_S,
    Caller,
    agent_of,
    caller,
    command,
    using,
    within,
)

GONE_WITHIN_S = 20.0  # a second or two, where nothing else wants the processor
AS_LONG = 10  # or as many times what its engine takes to end one, where all is slow
NOBODY = {"username": "", "password": ""}
contained = pytest.mark.parametrize("kind", ["docker", "podman", "gvisor"])
engines = pytest.mark.parametrize("kind", ["docker", "podman"])
# gVisor's kernel is its own: what a task finds there says nothing of the host's
OF_ITS_OWN_KERNEL = {
    "sees kernel tuning",
    "opens netlink",
    "asks for keys",
    "makes devices",
    "makes a user namespace",
    "makes a mount namespace",
}
HERE = [name for name in PROBES if os.path.exists(NEEDED.get(name, "/"))]


@contained
def test_no_probe_gets_through(kind: str, tmp_path: Path) -> None:
    planted = f"planted-{secrets.token_hex(8)}"
    (tmp_path / planted).touch()
    names = [name for name in HERE if kind != "gvisor" or name not in OF_ITS_OWN_KERNEL]
    script = probe_script(names, planted)
    ran = using(kind, tmp_path / "data", lambda runtime: command(runtime, "python", "-c", script))
    assert ran.ended.exit_code == 0, ran.err
    assert [name for name, reached in verdicts(ran.out).items() if reached] == []


@engines
def test_every_probe_gets_through_without_the_defences(kind: str, tmp_path: Path) -> None:
    planted = f"planted-{secrets.token_hex(8)}"
    (tmp_path / planted).touch()
    engine = shared_engine(kind)
    binds = [f"{tmp_path}:/host", f"{engine.root}:/engine"]
    argv = ["python", "-c", probe_script(HERE, planted)]
    reached = verdicts(undefended(engine, IMAGE, argv, *binds))
    assert [name for name, got in reached.items() if not got] == []


@contained
def test_an_image_that_is_not_there_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match=r"cannot pull localhost:1/no/such:1: .*check the name"):
        using(kind, tmp_path, lambda runtime: run_image(runtime, "localhost:1/no/such:1", "true"))


@contained
def test_a_name_that_is_none_never_reaches_the_engine(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match="is no image reference"):
        using(kind, tmp_path, lambda runtime: run_image(runtime, "x?fromSrc=http://y", "true"))


@contained
def test_a_function_for_another_python_is_told_so(kind: str, tmp_path: Path) -> None:
    async def work(runtime: Any) -> None:
        await runtime.start_runner(RunnerJob("3.99", (), (), LIMITS))

    with pytest.raises(SandboxFailed, match=f"the image has Python {PYTHON}, .* needs 3.99"):
        using(kind, tmp_path, work)


@contained
def test_a_function_in_an_image_without_python_is_told_so(kind: str, tmp_path: Path) -> None:
    async def work(runtime: Any) -> None:
        await runtime.start_runner(RunnerJob(PYTHON, (), (), LIMITS, image=BARE_IMAGE))

    with pytest.raises(SandboxFailed, match=r"gpool-test/bare:latest has no python3"):
        using(kind, tmp_path, work)


@contained
def test_a_runner_takes_large_arguments_and_gives_large_values(kind: str, tmp_path: Path) -> None:
    def twice(data: bytes) -> bytes:
        print("called")  # noqa: T201 - what is tested
        return data + data

    async def work(runtime: Any) -> tuple[bool, tuple[tuple[int, bytes], ...]]:
        given = os.urandom(300_000)
        arguments = tmp_path / "arguments"
        arguments.write_bytes(pickle.dumps(((given,), {})))
        calling = await caller(runtime)
        pickled = cloudpickle.dumps(twice)
        name = hashlib.sha256(pickled).hexdigest()
        await calling.runner.define(name, pickled)
        await calling.runner.send([FunctionCall(1, name, arguments_file=arguments)])
        answer = (await calling.answers(1))[0]
        assert answer.value_file is not None
        same = pickle.loads(answer.value_file.read_bytes()) == given + given
        answer.value_file.unlink()
        await calling.runner.remove()
        return same, calling.said(answer)

    assert using(kind, tmp_path, work) == (True, ((1, b"called\n"),))


@contained
def test_many_calls_keep_their_own_output(kind: str, tmp_path: Path) -> None:
    def speak(number: int) -> int:
        print("say", number)  # noqa: T201 - what is tested
        return number

    async def work(runtime: Any) -> list[tuple[tuple[int, bytes], ...]]:
        calling: Caller = await caller(runtime)
        await calling.send(speak, *((n,) for n in range(50)))
        answers = await calling.answers(50)
        await calling.runner.remove()
        return [calling.said(answer) for answer in answers]

    assert using(kind, tmp_path, work) == [((1, b"say %d\n" % n),) for n in range(50)]


@engines
def test_processes_are_counted(kind: str, tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "made = []\n"
        "try:\n"
        "    for _ in range(100):\n"
        "        pid = os.fork()\n"
        "        if pid == 0: signal.pause()\n"
        "        made.append(pid)\n"
        "except BlockingIOError: pass\n"
        "print(len(made))\n"
    )
    few = SandboxLimits(cpu_milli=1000, memory_bytes=256 << 20, processes=30)
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "python", "-c", code, limits=few))
    assert 10 < int(ran.out) < 30
    more = SandboxLimits(cpu_milli=1000, memory_bytes=256 << 20, processes=200)
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "python", "-c", code, limits=more))
    assert int(ran.out) == 100


@engines
def test_a_full_disk_ends_the_container_and_says_so(kind: str, tmp_path: Path) -> None:
    small = SandboxLimits(cpu_milli=1000, memory_bytes=256 << 20, disk_bytes=8 << 20)
    code = "while :; do head -c 4000000 /dev/zero > $i.bin; i=x$i; [ ${#i} -gt 20 ] && exec sleep 5000; done"
    ran = using(kind, tmp_path, lambda runtime: command(runtime, "sh", "-c", code, limits=small))
    assert (ran.ended.reason, ran.ended.exit_code) == (EndReason.BAD_OUTPUT, 137)


@engines
def test_what_an_image_declares_as_volume_is_no_way_to_the_hosts_disk(
    kind: str, tmp_path: Path
) -> None:
    engine = shared_engine(kind)
    import_image(engine, image_tar(BARE_IMAGE), "gpool-test/volume:latest", "VOLUME /data")
    script = "head -c 100000000 /dev/zero > /data/x; wc -c < /data/x"
    small = SandboxLimits(cpu_milli=1000, memory_bytes=64 << 20)
    ran = using(
        kind,
        tmp_path,
        lambda runtime: run_image(
            runtime, "gpool-test/volume:latest", "sh", "-c", script, limits=small
        ),
    )
    assert ran.out.strip() != b"100000000"
    assert (
        undefended(engine, "gpool-test/volume:latest", ["sh", "-c", script]).strip() == b"100000000"
    )


@contained
def test_a_task_may_save_when_it_is_warned(kind: str, tmp_path: Path) -> None:
    async def work(runtime: Any) -> tuple[bytes, int]:
        script = "trap 'echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done"
        job = CommandJob(("sh", "-c", script), (), (), (), LIMITS)
        sandbox = await runtime.start_command(job)
        stream = sandbox.output()
        assert await anext(stream) == (1, b"up\n")
        await sandbox.warn()
        rest = b"".join([data async for _, data in stream])
        ended = await sandbox.ended()
        await sandbox.warn()
        await sandbox.remove()
        return rest, int(ended.exit_code)

    assert using(kind, tmp_path, work) == (b"saved\n", 3)


AGENT = """
import asyncio
from dataclasses import replace
from pathlib import Path

from gpool.agent.runtime.protocol import CommandJob
from tests.tools.runtimes import LIMITS, MAKERS
async def main():
    runtime = MAKERS[{kind!r}](Path({data!r}))
    job = CommandJob(("sh", "-c", "echo up; exec sleep 1000"), (), (), (), LIMITS)
    sandbox = await runtime.start_command(job)
    async for stream, data in sandbox.output():
        print(data.decode(), flush=True)
asyncio.run(main())
"""


@pytest.mark.alone
@contained
def test_no_container_outlives_the_agent(kind: str, tmp_path: Path) -> None:
    engine = shared_engine("podman" if kind == "podman" else "docker")
    for number in range(3):  # the best of a few: each may meet a moment when nothing gets on
        with agent_of(AGENT, kind=kind, data=str(tmp_path / str(number))) as agent:
            assert [entry["State"] for entry in containers_of(engine)] == ["running"]
            agent.kill()
            took_s = eventually("none runs", lambda: none_left(engine, ("running",)), PATIENCE_S)
        eventually("none is left", lambda: none_left(engine), PATIENCE_S)
        if took_s < GONE_WITHIN_S or took_s < AS_LONG * ended_by_hand_s(engine):
            return
    pytest.fail(f"a container ran on for {took_s:.0f} s without its agent")


def running(engine: Any) -> list[str]:
    return [entry["Id"] for entry in containers_of(engine) if entry["State"] == "running"]


def ended_by_hand_s(engine: Any) -> float:
    """How long the engine itself takes, now."""
    with docker_client(engine) as api:
        apart = api.create_host_config(network_mode="none")  # or Podman makes a bridge on the host
        made = api.create_container(IMAGE, ["sleep", "1000"], host_config=apart)["Id"]
        try:
            api.start(made)
            began = time.monotonic()
            api.kill(made)
            api.wait(made)
            return time.monotonic() - began
        finally:
            api.remove_container(made, force=True)


@engines
def test_a_guard_that_fell_is_replaced_and_sweep_spares_others(kind: str, tmp_path: Path) -> None:
    engine = shared_engine(kind)

    async def work() -> tuple[int, int, int]:
        mine = DockerRuntime(
            tmp_path / "a", engine=engine.address, default_image=IMAGE, gvisor=Gvisor.NEVER
        )
        other = DockerRuntime(
            tmp_path / "b", engine=engine.address, default_image=IMAGE, gvisor=Gvisor.NEVER
        )
        try:
            job = CommandJob(("sleep", "1000"), (), (), (), LIMITS)
            await mine.start_command(job)
            first = mine._containers.guard.process
            assert first is not None
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            await mine.start_command(job)
            second = mine._containers.guard.process
            assert second is not None
            assert second.poll() is None
            before = len(running(engine))
            await other.sweep()
            spared = len(running(engine))
            await mine.sweep()
            return before, spared, len(running(engine))
        finally:
            await mine.close()
            await other.close()

    assert within(work()) == (2, 2, 0)


@engines
def test_a_start_that_is_given_up_leaves_no_container(kind: str, tmp_path: Path) -> None:
    engine = shared_engine(kind)

    async def work(runtime: Any) -> None:
        job = CommandJob(("sleep", "1000"), (), (), (), LIMITS)
        for patience in (0.001, 0.05, 0.1, 0.2):
            starting = asyncio.create_task(runtime.start_command(job))
            await asyncio.wait([starting], timeout=patience)
            if starting.cancel():
                await asyncio.wait([starting])
                assert starting.cancelled()
            else:
                await starting.result().remove()
            assert containers_of(engine) == []

    using(kind, tmp_path, work)


@pytest.fixture
def registry(require: Callable[[str], None], tmp_path: Path) -> Any:
    """A real image registry on loopback."""
    require("image registry")
    settings = tmp_path / "registry.yml"
    settings.write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {tmp_path}/registry\n"
        f"http:\n  addr: 127.0.0.1:0\n"
    )
    log = tmp_path / "registry.log"  # no pipe: while nobody reads it, a full one would hold it up
    with (
        log.open("wb") as said,
        subprocess.Popen(["docker-registry", "serve", str(settings)], stderr=said) as child,
    ):
        try:
            listens = re.compile(r"listening on (127\.0\.0\.1:\d+)")
            eventually(
                "it listens",
                lambda: bool(listens.search(log.read_text())) or child.poll() is not None,
                PATIENCE_S,
            )
            found = listens.search(log.read_text())
            assert found is not None, "the registry ended"
            yield found[1]
        finally:
            child.terminate()


def registry_mark(folder: Path) -> Path:
    (folder / "mark").write_text(secrets.token_hex(16))
    return folder / "mark"


@pytest.mark.parametrize("kind", ["docker"])  # Podman wants TLS of a registry
def test_an_image_is_pulled_by_digest_and_its_progress_told(
    kind: str, registry: str, tmp_path: Path
) -> None:
    engine = shared_engine(kind)
    name = f"{registry}/team/bare"
    tar = tmp_path / "new.tar"
    with tarfile.open(image_tar(BARE_IMAGE)) as old, tarfile.open(tar, "w") as new:
        for entry in old:
            new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
        new.add(registry_mark(tmp_path), "mark")  # layers that the engine has are not fetched
    import_image(engine, tar, f"{name}:1")
    with docker_client(engine) as api:
        said = list(api.push(name, "1", stream=True, decode=True, auth_config=NOBODY))
        api.remove_image(f"{name}:1")
    digests = DIGEST.findall(str(said))
    assert digests, said
    wanted = f"{name}@{digests[-1]}"
    heard: tuple[list[str], list[str]] = ([], [])
    runtime = DockerRuntime(
        tmp_path / "data",
        engine=engine.address,
        gvisor=Gvisor.NEVER,
        registries=[registry],
    )

    async def work() -> list[bytes]:
        try:
            both = (
                run_image(runtime, wanted, "echo", str(n), progress=heard[n].append)
                for n in range(2)
            )
            ran = [each.out for each in await asyncio.gather(*both)]
            missing = f"{name}@sha256:{'0' * 64}"
            with pytest.raises(SandboxFailed, match="cannot pull"):
                await run_image(runtime, missing, "true")
            return ran
        finally:
            await runtime.close()

    assert within(work()) == [b"0\n", b"1\n"]
    shorter, longer = sorted(heard, key=len)
    assert longer[0] == f"pulling {wanted}"
    assert longer[len(longer) - len(shorter) :] == shorter  # two tasks, one pull
    assert any("layers" in text for text in longer)


@pytest.fixture
def lane(require: Callable[[str], None]) -> Iterator[SandboxNetwork]:
    """A network namespace of our own with one address, and nothing behind it."""
    require("network namespaces")
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as holder:
        mine, theirs = (Path(f"/proc/{who}/ns/net") for who in ("self", holder.pid))
        here = mine.stat().st_ino
        eventually("it is elsewhere", lambda: theirs.stat().st_ino != here, PATIENCE_S)
        for words in ("link add lane0 type veth peer name lane1", "addr add 10.9.8.7/24 dev lane0"):
            subprocess.run(
                ["nsenter", "-t", str(holder.pid), "-n", "ip", *words.split()], check=True
            )
        descriptor = os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        yield SandboxNetwork((descriptor,), "10.9.8.1")
        os.close(descriptor)
        assert holder.stdin is not None
        holder.stdin.close()


async def look_at_network(runtime: Any, lane: SandboxNetwork | None) -> bytes:
    script = "cat /proc/net/dev /etc/resolv.conf"
    job = CommandJob(("sh", "-c", script), (), (), (), LIMITS, network=lane)
    sandbox = await runtime.start_command(job)
    seen = b"".join([data async for _, data in sandbox.output()])
    await sandbox.remove()
    return seen


@engines
def test_a_lane_is_entered_where_the_engine_can(
    kind: str, lane: SandboxNetwork, tmp_path: Path
) -> None:
    async def work(runtime: Any) -> tuple[bytes, bytes]:
        assert runtime.networks == {Network.NONE, Network.EGRESS}
        return await look_at_network(runtime, lane), await look_at_network(runtime, None)

    inside, without = using(kind, tmp_path, work)
    assert b"lane0" in inside
    assert b"nameserver 10.9.8.1" in inside
    assert b"lane0" not in without


@pytest.mark.parametrize("kind", ["gvisor"])
def test_a_lane_is_refused_where_the_engine_cannot(
    kind: str, lane: SandboxNetwork, tmp_path: Path
) -> None:
    async def offered(runtime: Any) -> Any:
        return runtime.networks

    assert using(kind, tmp_path, offered) == {Network.NONE}
    with pytest.raises(SandboxFailed, match="cannot enter a sandbox network"):
        using(kind, tmp_path, lambda runtime: look_at_network(runtime, lane))


@pytest.mark.parametrize("kind", ["docker", "podman"])
@pytest.mark.parametrize("trusted", [True, False])
def test_an_image_s_name_never_makes_the_engine_dial_the_owner_s_network(
    kind: str, trusted: bool, tmp_path: Path
) -> None:
    """The control: named by the owner, it is dialled."""
    engine = shared_engine(kind)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S if trusted else 3)
        registry = f"127.0.0.1:{listening.getsockname()[1]}"
        runtime = DockerRuntime(
            tmp_path / "data",
            engine=engine.address,
            gvisor=Gvisor.NEVER,
            registries=[registry] if trusted else [],
        )
        dialled: list[bool] = []

        def listen() -> None:
            try:
                channel, _ = listening.accept()
                channel.close()
                dialled.append(True)
                listening.close()
            except TimeoutError:
                dialled.append(False)

        async def work() -> None:
            hearing = asyncio.create_task(asyncio.to_thread(listen))
            said = "cannot pull" if trusted else "private address"
            job = CommandJob(("true",), (), (), (), LIMITS, image=f"{registry}/a/b:1")
            try:
                with pytest.raises(SandboxFailed, match=said):
                    await runtime.start_command(job)
                await hearing
            finally:
                await runtime.close()

        within(work())
        assert dialled == [trusted]


@engines
def test_a_container_lists_the_interfaces_of_its_own_network(
    kind: str, lane: SandboxNetwork, tmp_path: Path
) -> None:
    asks = "import socket; print([name for _, name in socket.if_nameindex()])"

    async def asked(runtime: Any, lane: SandboxNetwork | None) -> bytes:
        job = CommandJob(("python3", "-c", asks), (), (), (), LIMITS, network=lane)
        sandbox = await runtime.start_command(job)
        seen = b"".join([data async for _, data in sandbox.output()])
        await sandbox.remove()
        return seen

    async def work(runtime: Any) -> tuple[bytes, bytes]:
        return await asked(runtime, lane), await asked(runtime, None)

    in_a_lane, alone = using(kind, tmp_path, work)
    assert b"'lane0'" in in_a_lane
    assert b"'lo'" in alone
    assert b"'lane0'" not in alone
