"""A server's end of the agent's channel and artifact routes, in this process, speaking the real frames."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from http import HTTPStatus
from pathlib import Path

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from gpool.agent.settings import AgentSettings
from gpool.core.model import Allocation, Offer, Slice, TaskSpec
from gpool.transfer.keys import write_private
from gpool.transfer.node_proofs import (
    PROOF_HEADER,
    ChallengeStatement,
    NodeKey,
    Purpose,
    RequestStatement,
    parse_request_proof,
)
from gpool.wire.frames import (
    CHANNEL_PATH,
    NODE_HEADER,
    Beat,
    BeatSeen,
    Challenge,
    Finished,
    FromServer,
    Grants,
    HandedBack,
    Hello,
    Lease,
    Line,
    LogChunk,
    OfferChanged,
    Prove,
    Proven,
    Recorded,
    Refused,
    Released,
    ReportItem,
    Reports,
    Welcome,
    decode_any_from_agent,
    encode,
)
from tests.tools.nodes import a_key
from tests.tools.runtimes import PATIENCE_S

NODE, SERVER, TOKEN = "n-0000000000001", "pool-of-the-test", "the node's token"
KEY = a_key()
NOT_SIGNED_IN = '{"code": "not_signed_in", "detail": "no"}'
AT_S = 1_900_000_000
"""The server's time; nobody else's clock shows it."""


class Desk:
    """Welcomes, confirms, records; keeps every report. Its artifacts can only be fetched."""

    def __init__(self, ttl_us: int = 900_000_000, margin_us: int = 5_000_000) -> None:
        self.ttl_us, self.margin_us = ttl_us, margin_us
        self.hellos: list[Hello] = []
        self.items: list[ReportItem] = []
        self.offers: list[Offer] = []
        self.proofs: list[Prove] = []
        self.unproven = 0
        self.asked = Purpose.CHANNEL
        self.token_us = 900_000_000
        self.batches = 0
        self.artifacts: dict[str, bytes] = {}
        self.refuse: Refused | None = None
        self.mute = False  # confirms nothing any more
        self.changed = asyncio.Event()
        self.connection: ServerConnection | None = None
        self.beat = 0
        self.specs: dict[TaskSpec, int] = {}
        self._server: Server | None = None

    async def __aenter__(self) -> Desk:
        self._server = await serve(
            self.converse,
            "127.0.0.1",
            0,
            process_request=self.artifact,
            compression=None,
            max_size=None,
            ping_interval=None,  # whoever stands still for a while is not hung up on
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    def artifact(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == CHANNEL_PATH:
            known = request.headers.get(NODE_HEADER) == NODE
            return None if known else connection.respond(HTTPStatus.UNAUTHORIZED, NOT_SIGNED_IN)
        if not self.is_vouched_for(request):
            self.unproven += 1
            return connection.respond(HTTPStatus.UNAUTHORIZED, NOT_SIGNED_IN)
        data = self.artifacts.get(request.path.rsplit("/", 1)[1])
        if data is None:
            return connection.respond(HTTPStatus.NOT_FOUND, "no such artifact")
        headers = Headers({"Content-Length": str(len(data)), "Connection": "close"})
        return Response(200, "OK", headers, data)

    def is_vouched_for(self, request: Request) -> bool:
        proof = parse_request_proof(request.headers.get(PROOF_HEADER, ""))
        if proof is None or request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return False
        lease = request.headers.get("Gpool-Lease", "")
        signed = {
            KEY.sign(
                RequestStatement(
                    SERVER, method, request.path, TOKEN, proof.at_s, proof.nonce, lease
                )
            )
            for method in ("GET", "HEAD")  # the library does not say which
        }
        return 0 <= proof.at_s - AT_S < PATIENCE_S and proof.signature in signed

    def keep(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        self.artifacts[sha256] = data
        return sha256

    async def converse(self, connection: ServerConnection) -> None:
        self.connection = connection
        await self.say(Challenge("nonce-1", "channel"))
        async for message in connection:
            assert isinstance(message, bytes)
            frame = decode_any_from_agent(message)
            match frame:
                case Prove():
                    await self.judge(frame)
                case Hello() if self.refuse is not None:
                    await connection.send(encode(self.refuse))
                case Hello():
                    self.hellos.append(frame)
                    self.beat = frame.beat
                    await self.say(Welcome(1, frame.beat, self.ttl_us, self.margin_us, 200_000, ()))
                case Beat() if not self.mute:
                    self.beat = frame.number
                    await self.say(BeatSeen(frame.number))
                case OfferChanged():
                    self.offers.append(frame.offer)
                case Reports():
                    assert frame.token == TOKEN
                    self.batches += 1
                    self.items += frame.items
                    await self.say(Recorded(frame.sequence))
            self.changed.set()

    async def judge(self, frame: Prove) -> None:
        self.proofs.append(frame)
        purpose = self.asked
        statement = ChallengeStatement(purpose, SERVER, NODE, KEY.public, frame.nonce)
        if frame.signature != KEY.sign(statement):
            await self.say(Refused("not_signed_in", "join again with a new link", False))
        else:
            await self.say(Proven(TOKEN, AT_S * 1_000_000, self.token_us))

    async def say(self, frame: FromServer) -> None:
        assert self.connection is not None
        if isinstance(frame, Challenge):
            self.asked = Purpose(frame.purpose)
        await self.connection.send(encode(frame))

    async def grant(
        self,
        spec: TaskSpec,
        leases: list[Lease],
        number: int = 0,
        *,
        owner: bool = False,
        slices: tuple[Slice, ...] = (),
    ) -> None:
        known = self.specs.setdefault(spec, len(self.specs))
        line = Line(Allocation(number, 1000, 1 << 30, slices), 7, owner, known, tuple(leases))
        await self.say(Grants(self.beat, ((known, spec),), (line,)))

    async def until(self, wanted: object, within: float = PATIENCE_S) -> None:
        """Wait until `wanted()` holds; looked at whenever something arrived."""
        assert callable(wanted)
        async with asyncio.timeout(within):
            while not wanted():
                self.changed.clear()
                await self.changed.wait()

    def ends(self) -> dict[int, Finished | Released | HandedBack]:
        kinds = (Finished, Released, HandedBack)
        return {item.task: item for item in self.items if isinstance(item, kinds)}

    def log_of(self, task: int) -> bytes:
        return b"".join(i.data for i in self.items if isinstance(i, LogChunk) and i.task == task)


def settings_for(desk: Desk, folder: Path) -> AgentSettings:
    file = folder / "node.key"
    write_private(file, base64.urlsafe_b64encode((1).to_bytes(32, "big")), replace=False)
    assert NodeKey.from_file(file).public == KEY.public
    return AgentSettings(
        server_url=desk.url,
        node=NODE,
        server_name=SERVER,
        key_file=file,
        data_dir=folder / "data",
        slots=2,
    )
