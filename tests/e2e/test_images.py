"""The images of deploy/docker, built without network on a base made by debootstrap, and run as the manifests run them.

By `make soak` only, but for the examples that are merely parsed.
"""

from __future__ import annotations

import io
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.tools.engines import PrivateEngine, docker_client, engine, import_image
from tests.tools.processes import LONG_LEASE, PATIENCE_S, Pool, eventually, free_port

Manifest = dict[str, Any]

SOAKS = bool(os.environ.get("GPOOL_SOAK"))
ROOT = Path(__file__).resolve().parents[2]
BASE = "gpool-test/base:latest"
SERVER, AGENT = "gpool-server:0.1.0", "gpool-agent:0.1.0"
BUILD_S = 900.0
MOST_BYTES = 300 << 20
"""Size of an image beyond its base."""

CONFINED = {"read_only": True, "tmpfs": {"/tmp": "", "/run/gpool": ""}, "network_mode": "host"}


@dataclass(frozen=True, slots=True)
class Images:
    engine: PrivateEngine

    def size(self, name: str) -> int:
        with docker_client(self.engine) as api:
            return int(api.inspect_image(name)["Size"])

    def output(self, image: str, *command: str) -> str:
        """Run the command in a container without network, as the image's own user."""
        with docker_client(self.engine) as api:
            settings = api.create_host_config(**{**CONFINED, "network_mode": "none"})
            made = api.create_container(
                image, list(command[1:]), entrypoint=command[0], host_config=settings
            )["Id"]
            api.start(made)
            code = api.wait(made, timeout=PATIENCE_S)["StatusCode"]
            found: bytes = api.logs(made)
            api.remove_container(made)
        return f"{code} {found.decode()}"

    @contextmanager
    def agent(self, pool: Pool, pod: Manifest, name: str, **settings: Any) -> Iterator[None]:
        """A node in containers with the commands, users and mount points of a pod's manifest."""
        folder = Path(tempfile.mkdtemp(prefix="gpool-agent-"))
        user = pod.get("securityContext", {}).get("runAsUser", 0)
        [invite], [agent] = pod["initContainers"], pod["containers"]
        binds = {"/run/gpool-link": folder / "link", "/var/lib/gpool": folder / "state", "/etc/gpool": folder / "policy"}  # fmt: skip
        for each in binds.values():
            each.mkdir()
            os.chown(each, user, user)
        (folder / "policy" / "policy.toml").write_text('tiers = ["none"]\n')
        mounts = {each["mountPath"] for each in (*invite["volumeMounts"], *agent["volumeMounts"])}
        bound = {str(found): place for place, found in binds.items() if place in mounts}
        own = {"POD_NAME": name, "NODE_NAME": name}
        with docker_client(self.engine) as api:

            def start(container: Manifest, environment: dict[str, str], **more: Any) -> str:
                given = api.create_host_config(binds=bound, **CONFINED)
                given.update(more)
                first, *rest = container["command"]
                made: str = api.create_container(
                    AGENT,
                    rest,
                    entrypoint=first,
                    user=str(user),
                    environment=environment,
                    host_config=given,
                )["Id"]
                api.start(made)
                return made

            inviting = start(invite, {"GPOOL_URL": pool.address, "GPOOL_KEY": pool.key}, CapDrop=["ALL"])  # fmt: skip
            code = api.wait(inviting, timeout=PATIENCE_S)["StatusCode"]
            assert code == 0, api.logs(inviting)
            api.remove_container(inviting)
            made = start(agent, own, **settings)
            try:
                pool.until_online(name)
                yield
            finally:
                api.stop(made, timeout=60)
                (pool.directory / f"{name}.log").write_bytes(api.logs(made))
                api.remove_container(made)
                shutil.rmtree(folder, ignore_errors=True)


def pod_of(file: str) -> Manifest:
    """The pod of the last manifest in a file of deploy/kubernetes."""
    *_, last = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / file).read_text())
    found: Manifest = last["spec"]["template"]["spec"]
    return found


def run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def make_base(folder: Path) -> Path:
    """Debian with Python, from the archive that this machine's apt uses."""
    shown = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")  # fmt: skip
    archive, release = shown.splitlines()[0].split()
    root, packed = folder / "root", folder / "base.tar"
    options = ["--variant=minbase", "--include=python3,python3-venv"]
    run("debootstrap", *options, release, str(root), archive)
    run("tar", "-C", str(root), "-cf", str(packed), ".")
    shutil.rmtree(root)
    return packed


def make_wheels(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for lock in ("server", "agent"):
        words = ["--require-hashes", "--only-binary", ":all:", "-r", f"requirements/{lock}.txt"]
        run(*pip, "download", *words, "-d", str(folder), cwd=ROOT)
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), ".", cwd=ROOT)


def context_of(wheels: Path) -> io.BytesIO:
    """The build context, as .dockerignore leaves it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(ROOT / "requirements", "requirements")
        tar.add(ROOT / "deploy" / "docker" / "Dockerfile", "Dockerfile")
        tar.add(wheels, "deploy/docker/wheels")
    packed.seek(0)
    return packed


@pytest.fixture(scope="module")
def images(
    require: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Images]:
    if not SOAKS:
        pytest.skip("images are built for minutes: by make soak")
    for component in ("debootstrap", "docker-compose", "pip"):
        require(component)
    folder = tmp_path_factory.mktemp("images")
    make_wheels(folder / "wheels")
    with engine("docker") as made:
        import_image(made, make_base(folder), BASE)
        with docker_client(made) as api:
            for target, name in (("server", SERVER), ("agent", AGENT)):
                steps = api.build(
                    fileobj=context_of(folder / "wheels"),
                    custom_context=True,
                    network_mode="none",
                    buildargs={"BASE": BASE},
                    target=target,
                    tag=name,
                    rm=True,
                    decode=True,
                    timeout=BUILD_S,
                )
                failed = [step for step in steps if "error" in step]
                assert failed == []
        yield Images(made)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path, LONG_LEASE)
    try:
        made.start(agents=())
        yield made
    finally:
        made.stop()


@pytest.mark.slow
def test_the_images_are_small_and_hold_no_installer(images: Images) -> None:
    for name in (SERVER, AGENT):
        assert images.size(name) - images.size(BASE) < MOST_BYTES
        assert images.output(name, "gpool", "--version").startswith("0 gpool, version ")
        assert images.output(name, "sh", "-c", "ls /opt/gpool/bin/pip").startswith("2 ")
    assert images.output(SERVER, "id", "-u") == "0 10001\n"


@pytest.mark.slow
def test_a_server_of_the_compose_example_serves_on_a_read_only_root(images: Images) -> None:
    port = free_port()
    settings = {
        "PATH": os.environ["PATH"],
        "DOCKER_HOST": images.engine.address,
        "GPOOL_PUBLIC_URL": f"https://127.0.0.1:{port}",
        "GPOOL_PORT": str(port),
    }
    file = ROOT / "deploy" / "compose" / "compose.yaml"
    words = ["docker-compose", "-f", str(file), "-p", f"gpool{port}"]

    def compose(*more: str) -> str:
        done = subprocess.run(
            [*words, *more], env=settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_healthy() -> bool:
        with docker_client(images.engine) as api:
            [found] = api.containers(filters={"label": f"com.docker.compose.project=gpool{port}"})
            return "(healthy)" in found["Status"]

    try:
        compose("up", "-d")
        eventually("the health check passes", is_healthy, PATIENCE_S)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with httpx2.Client(verify=context, trust_env=False) as client:
            assert client.get(f"https://127.0.0.1:{port}/readyz").json()["status"] == "ok"
    finally:
        compose("down", "-v")


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.postgres.yaml")])
def test_docker_compose_accepts_the_examples(
    files: tuple[str, ...], require: Callable[[str], None]
) -> None:
    require("docker-compose")
    settings = {"GPOOL_PUBLIC_URL": "https://pool.example", "GPOOL_DATABASE_PASSWORD": "x"}
    named = [word for each in files for word in ("-f", str(ROOT / "deploy" / "compose" / each))]
    words = ["docker-compose", *named, "config", "-q"]
    environment = {"PATH": os.environ["PATH"], **settings}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing = subprocess.run(words, env={"PATH": environment["PATH"]}, capture_output=True, text=True, check=False)  # fmt: skip
    assert (missing.returncode, "GPOOL_PUBLIC_URL" in missing.stderr) == (1, True)


@pytest.mark.slow
def test_an_agent_with_the_listed_privileges_runs_sandboxes(images: Images, pool: Pool) -> None:
    """Less than `privileged`, which the DaemonSet asks for and not every machine can give a container."""
    unconfined = ["seccomp=unconfined", "apparmor=unconfined"]
    unmasked: dict[str, Any] = {"MaskedPaths": [], "ReadonlyPaths": []}
    settings = {"CapAdd": ["SYS_ADMIN"], "SecurityOpt": unconfined, **unmasked}
    with images.agent(pool, pod_of("agent/daemonset.yaml"), "listed", **settings):
        done = pool.gpool("run", "--", "sh", "-c", "id -u; echo inside")
        assert (done.returncode, done.stdout) == (0, "1000\ninside\n"), done.stderr


@pytest.mark.slow
def test_an_agent_without_privileges_offers_the_tier_none_alone(images: Images, pool: Pool) -> None:
    settings = {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"]}
    pod = pod_of("agent-unprivileged/statefulset.yaml")
    with images.agent(pool, pod, "plain", **settings):
        [node] = pool.ask("GET", "/v1/nodes").json()["items"]
        assert node["tiers"] == ["none"]
        done = pool.gpool("run", "--tier", "none", "--", "id", "-u")
        assert (done.returncode, done.stdout) == (0, "10001\n"), done.stderr
