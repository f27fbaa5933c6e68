"""Encryption: when it is on, what passes, whom clients believe, and whom the server believes about where requests come from."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import platform
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from gpool.agent.app import run_agent
from gpool.agent.services import NodeServices
from gpool.agent.settings import AgentSettings
from gpool.client.transport import ApiTransport
from gpool.core.errors import Forbidden, Invalid, Unreachable
from gpool.core.model import GIB, Offer, TaskStatus, Tier
from gpool.server.app import open_server
from gpool.server.identity.certificates import make
from gpool.server.main import configuration
from gpool.server.outbound import own_address
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from gpool.transfer.keys import write_private
from gpool.transfer.requests import Address, origin_of
from tests.server.server_desk import Live, serving
from tests.tools.nodes import a_key, joined
from tests.tools.processes import PATIENCE_S, eventually
from tests.tools.wiretap import tls_ends_at

MARK = b"a word that only we know"
OWN = own_address(4) or platform.node()
OWN_6 = f"[{own_address(6)}]" if own_address(6) else platform.node()


# ---- when it is on


@pytest.mark.parametrize(
    ("settings", "tls", "url"),
    [
        ({}, False, "http://127.0.0.1:8642"),
        ({"host": "::1"}, False, "http://[::1]:8642"),
        ({"host": "localhost", "tls": True}, True, "https://localhost:8642"),
        ({"host": "0.0.0.0"}, True, f"https://{OWN}:8642"),
        ({"host": "10.0.0.7"}, True, "https://10.0.0.7:8642"),
        ({"host": "0.0.0.0", "plain_http": True}, False, f"http://{OWN}:8642"),
        (
            {"host": "0.0.0.0", "plain_http": True, "public_url": "https://pool.example/"},
            False,
            "https://pool.example",
        ),
        ({"tls_cert": "a", "tls_key": "b"}, True, "https://127.0.0.1:8642"),
    ],
)
def test_off_loopback_tls_is_on_unless_a_proxy_ends_it(
    settings: dict[str, Any], tls: bool, url: str
) -> None:
    made = Settings(**settings)
    assert (made.uses_tls, made.url) == (tls, url)
    assert made.is_reached_by_tls == url.startswith("https")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0", "tls": False}, "exposes every key"),
        ({"host": "pool.example", "tls": False}, "exposes every key"),
        ({"tls_cert": "a"}, "set together"),
        ({"tls": True, "plain_http": True}, "contradicts"),
        ({"trusted_proxies": "10.0.0.1, nobody"}, "nobody"),
    ],
)
def test_what_would_leave_keys_in_the_clear_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**settings)


@pytest.mark.parametrize(
    ("settings", "origin"),
    [
        ({}, "http://127.0.0.1:8642"),
        ({"tls": True, "port": 19117}, "https://127.0.0.1:19117"),
        ({"host": "0.0.0.0"}, f"https://{OWN}:8642"),
        ({"host": "::1"}, "http://[::1]:8642"),
        ({"host": "::", "port": 443}, f"https://{OWN_6}"),
        ({"host": "0.0.0.0", "public_url": "https://Pool.example:443/"}, "https://pool.example"),
        ({"public_url": "http://[2001:DB8:0::7]:80"}, "http://[2001:db8::7]"),
    ],
)
def test_the_origin_has_the_scheme_of_tls_and_an_address_others_reach(
    settings: dict[str, Any], origin: str
) -> None:
    made = Settings(**settings)
    assert made.origin == origin_of(origin) == origin
    assert f"{urlsplit(origin).scheme}://{made.address}" == origin
    assert ipaddress.ip_address("::") not in _addresses(made.address)
    assert ipaddress.ip_address("0.0.0.0") not in _addresses(made.address)


def _addresses(place: str) -> list[object]:
    try:
        return [ipaddress.ip_address(urlsplit(f"//{place}").hostname or "")]
    except ValueError:
        return []  # a name


@pytest.mark.parametrize(
    "url",
    ["pool.example", "ftp://pool.example", "https://0.0.0.0:1", "https://[::]", "https://a/b"],
)
def test_a_public_url_that_nobody_can_dial_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="public_url"):
        Settings(public_url=url)


# ---- what passes


@dataclass
class Recorder:
    """Stands between clients and a server, and keeps all that passes."""

    target: int
    listening: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    heard: list[bytearray] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    carriers: list[threading.Thread] = field(default_factory=list)

    @property
    def port(self) -> int:
        port: int = self.listening.getsockname()[1]
        return port

    def run(self) -> None:
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            for one, other in ((near, far), (far, near)):
                kept = bytearray()
                self.heard.append(kept)
                self.sockets.append(one)
                self.carriers.append(threading.Thread(target=self.carry, args=(one, other, kept)))
                self.carriers[-1].start()

    @staticmethod
    def carry(one: socket.socket, other: socket.socket, kept: bytearray) -> None:
        try:
            while data := one.recv(1 << 16):
                kept += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        """After `run` has come to its end."""
        self.listening.close()
        for one in self.sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for carrier in self.carriers:
            carrier.join(PATIENCE_S)
        for one in self.sockets:
            one.close()


@contextmanager
def recorded(live: Live) -> Iterator[Recorder]:
    recorder = Recorder(int(live.url.rpartition(":")[2]))
    worker = threading.Thread(target=recorder.run)
    worker.start()
    try:
        yield recorder
    finally:
        recorder.listening.shutdown(socket.SHUT_RDWR)
        worker.join(PATIENCE_S)
        recorder.close()


def a_task_through(recorder: Recorder, live: Live, folder: Path) -> str:
    """A client and an agent at work through the recorder; how the task ended."""
    url = f"{live.url.partition(':')[0]}://127.0.0.1:{recorder.port}"
    api = ApiTransport(Address(url, live.fingerprint), live.key, patience_s=PATIENCE_S)
    badge = joined(lambda path, told: api.send_json("POST", path, told), a_key(), name="node")
    seed = base64.urlsafe_b64encode((1).to_bytes(32, "big"))
    write_private(folder / "node.key", seed, replace=True)
    settings = AgentSettings(
        server_url=url,
        fingerprint=live.fingerprint,
        node=badge.identity.node,
        server_name=badge.identity.server,
        key_file=folder / "node.key",
        data_dir=folder / "agent",
    )
    (folder / "values").mkdir(exist_ok=True)
    runtime = FakeRuntime(folder / "values", {("say",): FakeRun(((1, MARK),), files={"o": MARK})})
    offer = Offer(1000, GIB, GIB, tiers=frozenset({Tier.CONTAINER}))

    async def serve() -> str:
        stop = asyncio.Event()
        agent = asyncio.create_task(run_agent(settings, NodeServices([runtime]), offer, stop=stop))
        wanted = {"command": ["say"], "outputs": ["o"], "env": {"WORD": MARK.decode()}}

        def work() -> str:
            task = api.send_json("POST", "/v1/tasks", wanted)["ids"][0]

            def status() -> str:
                return str(api.get_json(f"/v1/tasks/{task}?wait=30")["status"])

            eventually("it has ended", lambda: TaskStatus(status()).is_final, PATIENCE_S)
            return status()

        status = await asyncio.to_thread(work)
        stop.set()
        await agent
        return status

    try:
        return asyncio.run(serve())
    finally:
        api.close()


def test_a_clients_and_an_agents_traffic_is_tls_and_nothing_else(
    data: Path, tmp_path: Path
) -> None:
    with serving(data, tls=True) as live, recorded(live) as recorder:
        assert a_task_through(recorder, live, tmp_path) == "succeeded"
    heard = [bytes(kept) for kept in recorder.heard if kept]
    assert sum(map(len, heard)) > 5_000
    for data_ in heard:
        assert tls_ends_at(data_) == len(data_)
        for word in (MARK, live.key.encode(), b"HTTP/1.1", b"gpool"):
            assert word not in data_


def test_the_recorder_hears_everything_without_tls(data: Path, tmp_path: Path) -> None:
    with serving(data) as live, recorded(live) as recorder:
        assert a_task_through(recorder, live, tmp_path) == "succeeded"
    heard = b"".join(bytes(kept) for kept in recorder.heard)
    for word in (MARK, live.key.encode(), b"HTTP/1.1"):
        assert word in heard


# ---- whom clients believe


def test_a_changed_certificate_is_refused_with_what_to_do(data: Path) -> None:
    with serving(data, tls=True) as live:
        good = ApiTransport(Address(live.url, live.fingerprint), live.key)
        assert good.get_json("/v1/me")["name"] == "operator"
        good.close()
        changed = ApiTransport(Address(live.url, "0" * 64), live.key, patience_s=PATIENCE_S)
        with pytest.raises(Forbidden, match=r"not the one you trust.*sign in or join again"):
            changed.get_json("/v1/me")
        changed.close()
        unpinned = ApiTransport(live.url, live.key, patience_s=0.1)
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            unpinned.get_json("/v1/me")
        unpinned.close()


def test_the_certificate_is_the_same_after_a_restart(data: Path) -> None:
    with serving(data, tls=True) as first:
        pass
    with serving(data, tls=True) as second:
        pass
    assert first.fingerprint == second.fingerprint
    assert (data / "server.pem").stat().st_mode & 0o777 == 0o600


def test_a_given_certificate_is_shown_and_its_link_pins_nothing(data: Path, tmp_path: Path) -> None:
    made = make(["127.0.0.1"], 1_700_000_000_000_000)  # type: ignore[arg-type]
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.certificate_pem)
    key.write_bytes(made.key_pem)
    with serving(data, tls_cert=cert, tls_key=key) as live:
        api = ApiTransport(Address(live.url, live.fingerprint), live.key)
        assert api.send_json("POST", "/v1/nodes/invites", {})["link"].endswith("#tls")
        api.close()
    assert not (data / "server.pem").exists()


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        (Address("http://10.0.0.7:8642"), True),
        (Address("http://pool.example"), True),
        (Address("http://127.0.0.1.example"), True),
        (Address("http://10.0.0.7:8642", plain=True), False),
        (Address("https://10.0.0.7:8642"), False),
        (Address("http://127.0.0.1:8642"), False),
        (Address("http://[::1]:8642"), False),
    ],
)
def test_keys_are_not_sent_in_the_clear_off_this_machine(address: Address, refused: bool) -> None:
    if not refused:
        ApiTransport(address, "gpk_x").close()
        return
    with pytest.raises(Invalid, match="not encrypted"):
        ApiTransport(address, "gpk_x")


# ---- whom the server believes


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("trusted", "sender", "believed"),
    [
        ("", "10.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.0/8, 192.168.0.1", "10.9.9.9", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
async def test_only_trusted_proxies_say_where_a_request_comes_from(
    data: Path, trusted: str, sender: str, believed: bool
) -> None:
    server: Server = await open_server(Settings(data=data, trusted_proxies=trusted))
    config = configuration(server)
    seen: list[tuple[str, str]] = []

    async def probe(scope: Any, _receive: Any, send: Any) -> None:
        seen.append((scope["client"][0], scope["scheme"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config.app = probe
    config.load()
    transport = httpx2.ASGITransport(app=config.loaded_app, client=(sender, 1))
    headers = {"x-forwarded-for": "6.6.6.6, 203.0.113.9", "x-forwarded-proto": "https"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://desk") as http:
        await http.get("/", headers=headers)
    assert seen == [("203.0.113.9", "https") if believed else (sender, "http")]
    await server.store.close()
