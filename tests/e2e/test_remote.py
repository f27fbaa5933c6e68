"""A pool whose agent and client are on another machine: what passes between them, and whom they believe."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpool.client.transport import ApiTransport
from gpool.core.errors import Unreachable
from gpool.transfer.keys import fingerprint_of
from gpool.transfer.requests import Address
from tests.tools.networks import unused_network
from tests.tools.processes import GPOOL, LONG_LEASE, PATIENCE_S, Daemon, eventually, free_port
from tests.tools.wiretap import Wiretap, tls_ends_at

MARK = "a word that only we know"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Remote:
    """The server is here; `there` is a machine of its own, at the other end of a cable."""

    folder: Path
    host: str
    interface: str
    there: tuple[str, ...]
    port: int = field(default_factory=free_port)
    daemons: list[Daemon] = field(default_factory=list)

    def environment(self, home: str, **more: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("GPOOL_")}
        (self.folder / home).mkdir(exist_ok=True)
        return {**inherited, **LONG_LEASE, "GPOOL_HOME": str(self.folder / home), **more}

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def key(self) -> str:
        return (self.data / "operator.key").read_text().strip()

    @property
    def fingerprint(self) -> str:
        pem = (self.data / "server.pem").read_text()
        start = pem.index("-----BEGIN CERTIFICATE-----")
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(pem[start:]))

    def serve(self, *options: str) -> Daemon:
        arguments = [
            "server",
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--data",
            str(self.data),
        ]
        log = self.folder / f"server-{len(self.daemons)}.log"
        made = Daemon([*arguments, *options], self.environment("server"), log)
        self.daemons.append(made)
        made.start()
        return made

    def api(self, *, tls: bool = True) -> ApiTransport:
        url = f"{'https' if tls else 'http'}://{self.host}:{self.port}"
        address = Address(url, self.fingerprint if tls else None, plain=not tls)
        return ApiTransport(address, self.key, patience_s=PATIENCE_S)

    def link(self, *, tls: bool = True) -> str:
        eventually("there is a key", (self.data / "operator.key").exists, PATIENCE_S)
        if tls:
            eventually("there is a certificate", (self.data / "server.pem").exists, PATIENCE_S)
        api = self.api(tls=tls)
        try:
            eventually("the server answers", lambda: _answers(api), PATIENCE_S)
            return str(api.send_json("POST", "/v1/nodes/invites", {})["link"])
        finally:
            api.close()

    def until_joined(self) -> None:
        api = self.api()
        try:
            eventually(
                "a node is online",
                lambda: any(
                    node["status"] == "online" for node in api.get_json("/v1/nodes")["items"]
                ),
                PATIENCE_S,
            )
        finally:
            api.close()

    def join(self, link: str, *options: str) -> Daemon:
        log = self.folder / f"agent-{len(self.daemons)}.log"
        environment = self.environment("agent")
        made = Daemon(["join", link, *options], environment, log, within=self.there)
        self.daemons.append(made)
        made.start()
        return made

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of a consumer over there."""
        return subprocess.run(
            [*self.there, *GPOOL, *arguments],
            env=self.environment("consumer", GPOOL_KEY=self.key, **environment),
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def pinned(self) -> dict[str, str]:
        url = f"https://{self.host}:{self.port}"
        return {"GPOOL_URL": url, "GPOOL_FINGERPRINT": self.fingerprint}


def _answers(api: ApiTransport) -> bool:
    try:
        return api.send_once("GET", "/readyz").status == 200
    except Unreachable:
        return False


@pytest.fixture
def remote(tmp_path: Path, require: Callable[[str], None]) -> Iterator[Remote]:
    require("network namespaces")
    require("bubblewrap")
    space, near, network = f"gpool-{os.getpid()}", f"gp{os.getpid()}", unused_network()
    ip("netns", "add", space)
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", "far", "netns", space)
        ip("address", "add", f"{network}.1/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", space, "address", "add", f"{network}.2/30", "dev", "far")
        ip("-n", space, "link", "set", "far", "up")
        ip("-n", space, "link", "set", "lo", "up")
        made = Remote(tmp_path, f"{network}.1", near, ("nsenter", f"--net=/run/netns/{space}"))
        try:
            yield made
        finally:
            for daemon in reversed(made.daemons):
                daemon.stop()
    finally:
        # A namespace that goes takes its links along, but some time later.
        subprocess.run(["ip", "link", "delete", near], check=False)
        ip("netns", "delete", space)


def work(remote: Remote, **environment: str) -> str:
    """A task with an input, an output and words of ours in all of them; what it printed."""
    (remote.folder / "input.txt").write_text(MARK * 100)
    command = f"cat input.txt > output.txt; echo '{MARK}'; exit 0"
    done = remote.run(
        "run",
        "--input",
        "input.txt",
        "--output",
        "output.txt",
        "--into",
        str(remote.folder / "back"),
        "--",
        "sh",
        "-c",
        command,
        **environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_off_loopback_the_wire_shows_only_tls(remote: Remote) -> None:
    with Wiretap(remote.interface) as tap:
        remote.serve()
        link = remote.link()
        assert link.endswith(f"#sha256={remote.fingerprint}")
        agent = remote.join(link)
        assert MARK in work(remote, **remote.pinned())
        assert agent.is_running, agent.said()
    streams = tap.streams()
    carried = {stream: data for stream, data in streams.items() if remote.port in stream[1::2]}
    assert sum(map(len, carried.values())) > 10_000
    assert set(streams) == set(carried)
    for stream, data in carried.items():
        assert tls_ends_at(data) == len(data), (stream, data[:80])
    everything = b"\0".join(carried.values())
    for secret in (MARK, remote.key, "HTTP/1.1", "gpool", link.split("/join/")[1].split("#")[0]):
        assert secret.encode() not in everything
    # The control: behind a proxy's back, in plain HTTP, the same tap hears every word.
    remote.daemons.pop().stop()
    remote.daemons.pop().stop()
    remote.port = free_port()
    with Wiretap(remote.interface) as tap:
        remote.serve("--behind-proxy", "127.0.0.1")
        remote.join(remote.link(tls=False), "--plain-http")
        work(remote, GPOOL_URL=f"http://{remote.host}:{remote.port}", GPOOL_PLAIN_HTTP="1")
    heard = b"\0".join(tap.streams().values())
    assert MARK.encode() in heard
    assert remote.key.encode() in heard


def test_a_changed_certificate_is_refused_by_agent_client_and_link(remote: Remote) -> None:
    server = remote.serve()
    link, pinned = remote.link(), remote.pinned()
    agent = remote.join(link)
    remote.until_joined()
    assert remote.run("ps", **pinned).returncode == 0
    server.stop()
    (remote.data / "server.pem").unlink()
    remote.serve()
    new = remote.link()
    assert new.partition("#")[2] != link.partition("#")[2]
    sentence = "the server's certificate is not the one you trust"
    eventually("the agent says why", lambda: sentence in agent.said(), PATIENCE_S)
    assert agent.is_running  # connected before: a proxy may show another certificate for a while
    assert "Traceback" not in agent.said()
    agent.stop()
    refused = remote.run("ps", **pinned)
    assert (refused.returncode, sentence in refused.stderr) == (3, True), refused.stderr
    for again, words in ((link, sentence), (new, "another certificate")):
        joining = remote.join(again)
        eventually("it is refused", lambda joining=joining: not joining.is_running, PATIENCE_S)  # type: ignore[misc]
        assert words in joining.said()
        assert joining.exit_code == 3


def test_without_encryption_nothing_is_sent_off_this_machine(remote: Remote) -> None:
    remote.serve("--behind-proxy", "127.0.0.1")
    remote.link(tls=False)
    with Wiretap(remote.interface) as tap:
        refused = remote.run("ps", GPOOL_URL=f"http://{remote.host}:{remote.port}")
        assert refused.returncode == 2
        assert "not encrypted" in refused.stderr
        joining = remote.join(f"gpool://{remote.host}:{remote.port}/join/gpi_x/pool-x")
        eventually("it is refused", lambda: not joining.is_running, PATIENCE_S)
    assert b"gpi_x" not in b"".join(tap.streams().values())
    assert remote.key.encode() not in b"".join(tap.streams().values())
