"""What the live container tests share: jobs that name an image, and a container without any of our defences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docker.errors import APIError

from gpool.agent.runtime.docker.runtime import disk_device
from gpool.agent.runtime.protocol import CommandJob, SandboxLimits, StartProgress, ignore_progress
from tests.tools.engines import PrivateEngine, docker_client
from tests.tools.runtimes import LIMITS, Ran


async def run_image(
    runtime: Any,
    image: str,
    *argv: str,
    limits: SandboxLimits = LIMITS,
    progress: StartProgress = ignore_progress,
) -> Ran:
    job = CommandJob(argv, (), (), (), limits, image=image, progress=progress)
    sandbox = await runtime.start_command(job)
    try:
        streams = {1: bytearray(), 2: bytearray()}
        async for stream, data in sandbox.output():
            streams[stream] += data
        return Ran(await sandbox.ended(), bytes(streams[1]), bytes(streams[2]))
    finally:
        await sandbox.remove()


def undefended(engine: PrivateEngine, image: str, argv: list[str], *binds: str) -> bytes:
    """The same command as root, with rights, the host's network and the given host paths: what a control needs."""
    disk = disk_device(engine.root)
    host: dict[str, Any] = {
        "CapAdd": ["SYS_ADMIN", "SYS_RAWIO", "SYS_PTRACE", "MKNOD", "NET_RAW"],
        "Devices": [{"PathOnHost": disk, "PathInContainer": disk, "CgroupPermissions": "r"}],
        "NetworkMode": "host",
        "PidMode": "host",
        "Binds": list(binds),
        "MaskedPaths": [],
        "ReadonlyPaths": [],
        "SecurityOpt": ["seccomp=unconfined"],
    }
    if engine.kind == "podman":
        host["SecurityOpt"] = ["seccomp=unconfined", "unmask=ALL"]
        few = {"Soft": 1024, "Hard": 1024}  # else it asks for more than this machine may allow
        host["Ulimits"] = [{"Name": name, **few} for name in ("nproc", "nofile")]
    body = {"Image": image, "Entrypoint": argv[:1], "Cmd": argv[1:], "HostConfig": host}
    with docker_client(engine) as api:
        container = api.create_container_from_config(body)["Id"]
        try:
            api.start(container)
            code = api.wait(container)["StatusCode"]
            printed = api.logs(container)
        finally:
            api.remove_container(container, force=True, v=True)
    assert code == 0, printed
    return bytes(printed)


def containers_of(engine: PrivateEngine) -> list[dict[str, Any]]:
    with docker_client(engine) as api:
        return list(api.containers(all=True))


def none_left(engine: PrivateEngine, states: tuple[str, ...] = ()) -> bool:
    """Whether it has none, or none in those states; not known while one is just being removed, which Podman stumbles over."""
    try:
        found = [entry["State"] for entry in containers_of(engine)]
    except APIError:
        return False
    return not [state for state in found if not states or state in states]


def verdicts(printed: bytes) -> dict[str, bool]:
    return dict(json.loads(printed))


def probe_script(names: list[str], secret: str) -> str:
    text = Path(__file__).with_name("container_probes.py").read_text()
    return f"{text}\nreport({names!r}, {secret!r})\n"
