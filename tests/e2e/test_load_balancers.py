"""The shipped nginx and HAProxy configurations, run by the real programs: agents, streams and tasks pass through TLS."""

from __future__ import annotations

import os
import ssl
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.tools.load_balancers import KINDS, running, write_certificate
from tests.tools.processes import GPOOL, LONG_LEASE, PATIENCE_S, Pool, eventually, free_port

BIG = 3 << 20
"""Bytes of an upload: beyond nginx's own limit of 1 MiB."""


@dataclass(frozen=True, slots=True)
class Balanced:
    """A pool that agents and clients reach through the proxy only."""

    pool: Pool
    port: int
    certificate: Path

    @property
    def address(self) -> str:
        return f"https://localhost:{self.port}"

    def client(self) -> httpx2.Client:
        context = ssl.create_default_context(cafile=str(self.certificate))
        headers = {"Authorization": f"Bearer {self.pool.key}"}
        return httpx2.Client(
            base_url=self.address, verify=context, headers=headers, trust_env=False, timeout=60
        )

    def gpool(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*GPOOL, *arguments],
            env={**self.pool.consumer(), "GPOOL_URL": self.address},
            cwd=self.pool.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


CHECKS = {"nginx": "-t", "haproxy": "-c"}


@pytest.fixture(scope="module", params=sorted(KINDS))
def balanced(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    require: Callable[[str], None],
) -> Iterator[Balanced]:
    """The proxy, a server, an agent, and a second replica that is down."""
    require(request.param)
    require("bubblewrap")
    folder, port, down = tmp_path_factory.mktemp("balanced"), free_port(), free_port()
    certificate = write_certificate(folder / "tls")
    settings = {
        **LONG_LEASE,
        "GPOOL_SERVER_PUBLIC_URL": f"https://localhost:{port}",
        "GPOOL_SERVER_TRUSTED_PROXIES": "127.0.0.1",
        "SSL_CERT_FILE": str(certificate),
    }
    pool = Pool(folder, settings)
    words = KINDS[request.param](folder / "tls", port, [down, pool.port])
    try:
        pool.start_server()
        with running(words, folder / "proxy.log") as proxy:
            found = Balanced(pool, port, certificate)
            with found.client() as client:
                eventually("the proxy serves", lambda: answers(client, proxy), PATIENCE_S)
            pool.join("first")
            yield found
    finally:
        pool.stop()


def answers(client: httpx2.Client, proxy: subprocess.Popen[bytes]) -> bool:
    assert proxy.poll() is None, "the proxy ended; its output is in proxy.log"
    try:
        return client.get("/readyz").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_program_accepts_the_shipped_configuration(
    kind: str, tmp_path: Path, require: Callable[[str], None]
) -> None:
    require(kind)
    write_certificate(tmp_path / "tls")
    words = [*KINDS[kind](tmp_path / "tls", 443, [8642]), CHECKS[kind]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower()


def test_the_agent_joined_through_the_proxy(balanced: Balanced) -> None:
    with balanced.client() as client:
        link = client.post("/v1/nodes/invites", json={}).json()["link"]
    parts = urllib.parse.urlsplit(link)
    assert (parts.netloc, parts.fragment) == (f"localhost:{balanced.port}", "tls")
    assert balanced.pool.online() == ["first"]


def test_a_task_with_a_large_input_and_output_passes(balanced: Balanced) -> None:
    folder = balanced.pool.directory
    (folder / "input.bin").write_bytes(os.urandom(BIG))
    done = balanced.gpool(
        "run", "--input", "input.bin", "--output", "output.bin", "--into", "back",
        "--", "sh", "-c", "cp input.bin output.bin; echo passed",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr
    assert (folder / "back" / "output.bin").read_bytes() == (folder / "input.bin").read_bytes()


def test_an_event_of_a_running_task_is_not_held_back(balanced: Balanced) -> None:
    """The task prints once and ends only when it is cancelled, so a buffered event would never come."""
    task = balanced.pool.submit("sh", "-c", "echo early; exec sleep 1000")
    with balanced.client() as client:
        wanted = {"Accept": "text/event-stream"}
        with client.stream("GET", f"/v1/tasks/{task}/logs", headers=wanted) as stream:
            assert any("early" in line for line in stream.iter_lines())
        assert client.get(f"/v1/tasks/{task}").json()["status"] == "running"
        client.delete(f"/v1/tasks/{task}").raise_for_status()
    balanced.pool.until_status(task, "cancelled")


def test_a_client_cannot_choose_its_address(balanced: Balanced) -> None:
    made_up = {"X-Forwarded-For": "198.51.100.7"}
    wrong = {"name": "nobody", "password": "wrong wrong wrong"}
    with balanced.client() as client:
        assert client.post("/v1/auth/password", json=wrong, headers=made_up).status_code == 401
        found = audited(balanced, "127.0.0.1")
        assert "198.51.100.7" not in found
        # The control: straight to the server, which trusts this machine's proxies, the header counts.
        direct = f"{balanced.pool.address}/v1/auth/password"
        assert httpx2.post(direct, json=wrong, headers=made_up).status_code == 401
        audited(balanced, "198.51.100.7")


def audited(balanced: Balanced, address: str) -> set[str]:
    """Wait until the audit log names the address; return all of them."""

    def addresses() -> set[str]:
        items = balanced.pool.ask("GET", "/v1/audit").json()["items"]
        return {each["address"] for each in items if each["outcome"] != "ok"}

    eventually(f"the audit log names {address}", lambda: address in addresses(), PATIENCE_S)
    return addresses()
