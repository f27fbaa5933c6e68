"""The agent's WebSocket to the server: connects, authenticates, reconnects with backoff, forwards frames.

Reads only authentication frames and `Refused`; adds the node's token to reports.

Proof times derive from the token's `server_at_us` and the boot clock: a wrong wall clock does no harm.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit, urlunsplit

import msgspec
import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.http11 import Response
from websockets.protocol import State

from gpool.agent.state_machine.instructions import Connected, Disconnected, Event, FrameArrived
from gpool.core.errors import (
    BY_CODE,
    Forbidden,
    GpoolError,
    InternalFault,
    Invalid,
    NotSignedIn,
    TooLarge,
    Unreachable,
)
from gpool.observability.context import REQUEST_ID
from gpool.transfer.keys import pinned_context, write_private, wrong_certificate
from gpool.transfer.node_proofs import (
    PROOF_HEADER,
    ChallengeStatement,
    NodeKey,
    Purpose,
    RequestStatement,
    new_nonce,
)
from gpool.transfer.requests import LEASE_HEADER, Address, Request
from gpool.wire.frames import (
    CHANNEL_PATH,
    MAX_FRAME_BYTES,
    NODE_HEADER,
    AgentFrame,
    Challenge,
    FromServer,
    Malformed,
    Prove,
    Proven,
    Refused,
    Reports,
    decode_any_from_server,
    encode,
)

SECOND_US = 1_000_000
BOOTS_FILE = "boots"


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    node: str
    server: str


class AgentCredentials:
    def __init__(self, key: NodeKey, identity: NodeIdentity, clock: Callable[[], int]) -> None:
        self._key, self.identity, self._clock = key, identity, clock
        self._token = ""
        self._server_ahead_us = 0  # the server's time minus our boot clock
        self._expires_at = 0  # by our boot clock

    def answer(self, challenge: Challenge, *, is_open: bool) -> Prove | None:
        """None for a purpose that is not due now: nothing else is ever signed."""
        purpose = Purpose.TOKEN if is_open else Purpose.CHANNEL
        if challenge.purpose != purpose:
            return None
        identity = self.identity
        statement = ChallengeStatement(
            purpose, identity.server, identity.node, self._key.public, challenge.nonce
        )
        return Prove(challenge.nonce, self._key.sign(statement))

    def take(self, proven: Proven) -> None:
        now = self._clock()
        self._token = proven.token
        self._server_ahead_us = proven.server_at_us - now
        self._expires_at = now + proven.lives_us

    def stamped(self, frame: AgentFrame) -> AgentFrame:
        if type(frame) is Reports:
            return Reports(frame.sequence, frame.items, self._token)
        return frame

    def vouch(self, request: Request) -> Mapping[str, str]:
        now = self._clock()
        if now >= self._expires_at:
            raise Unreachable(
                "the channel to the server is down and this node's token has expired; "
                "the agent gets a new one when it reconnects"
            )
        statement = RequestStatement(
            self.identity.server,
            request.method,
            request.path,
            self._token,
            (now + self._server_ahead_us) // SECOND_US,
            new_nonce(),
            request.headers.get(LEASE_HEADER, ""),
        )
        return {
            "Authorization": f"Bearer {self._token}",
            PROOF_HEADER: self._key.request_proof(statement),
        }


def next_boot(data_dir: Path) -> str:
    """Count this start on disk. Names sort by start, so the server can ignore late frames of an earlier one."""
    file = data_dir / BOOTS_FILE
    try:
        started = int(file.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):  # the first start, or a damaged file
        started = 0
    write_private(file, str(started + 1).encode("ascii"), replace=True)
    return f"{started + 1:012d}"


FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
LONGEST_RETRY_AFTER_S = 300.0
OPEN_WITHIN_S = 10.0
ANSWER_WITHIN_S = 15.0
PING_EVERY_S = 10.0

log = structlog.get_logger(__name__)


def channel_url(address: Address) -> str:
    parts = urlsplit(address.url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + CHANNEL_PATH, "", ""))


def _tls(address: Address) -> ssl.SSLContext | bool | None:
    if not address.url.startswith("https://"):
        return None
    return True if address.fingerprint is None else pinned_context(address.fingerprint)


class AgentChannel:
    """Feeds `Connected`, `FrameArrived` and `Disconnected`, in this order per connection."""

    def __init__(
        self,
        address: Address,
        credentials: AgentCredentials,
        feed: Callable[[Event], None],
        random: Random,
    ) -> None:
        address.refuse_if_open()
        self._address = address
        self._credentials = credentials
        self._tls = _tls(address)
        self._feed = feed
        self._random = random
        self._outgoing: deque[AgentFrame] = deque()
        self._wake = asyncio.Event()
        self._open: ClientConnection | None = None
        self._welcomed = False

    def send(self, frame: AgentFrame) -> None:
        """Write the frame at once, or leave it to `_write` while the connection is slow. Dropped while it is closed."""
        if self._open is None:
            return
        if self._outgoing or not _is_writable(self._open):
            self._outgoing.append(frame)
            self._wake.set()
            return
        self._open.protocol.send_binary(encode(self._credentials.stamped(frame)))
        self._open.send_data()

    async def run(self) -> None:
        """Stay connected until cancelled; raise `GpoolError` on a final refusal."""
        delay = FIRST_DELAY_S
        while True:
            wanted_s = 0.0  # the server's Retry-After
            try:
                await self._connect()
            except InvalidStatus as error:
                code = _problem_code(error.response)
                if code == Forbidden.code:
                    raise Forbidden(
                        f"{self._address.url} refuses this node: its owner's account is disabled or may not lend; "
                        "ask an operator of the pool"
                    ) from error
                if code == NotSignedIn.code:
                    raise NotSignedIn(
                        f"{self._address.url} does not know this node's key; join again with a new link: gpool join LINK"
                    ) from error
                wanted_s, status = _retry_after_s(error.response), error.response.status_code
                retry_s = round(max(delay, wanted_s), 2)
                log.warning("channel_refused", status=status, retry_s=retry_s)
            except ssl.SSLError as error:
                if (wrong := wrong_certificate(error)) is not None:
                    raise Forbidden(f"{self._address.url}: {wrong}") from error
                log.warning("channel_lost", error=str(error), retry_s=round(delay, 2))
            except (OSError, WebSocketException, Malformed, TimeoutError) as error:
                what = str(error) or type(error).__name__
                log.warning("channel_lost", error=what, retry_s=round(delay, 2))
            if self._welcomed:
                delay, self._welcomed = FIRST_DELAY_S, False
            # never earlier than the server wishes, and not all agents at once
            pause_s = max(
                delay * self._random.uniform(0.5, 1.0), wanted_s * self._random.uniform(1.0, 1.5)
            )
            await asyncio.sleep(pause_s)
            delay = min(LONGEST_DELAY_S, delay * 2)

    async def _connect(self) -> None:
        connection = await connect(
            channel_url(self._address),
            additional_headers={NODE_HEADER: self._credentials.identity.node},
            ssl=self._tls,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=64,
            open_timeout=OPEN_WITHIN_S,
            ping_interval=PING_EVERY_S,
            ping_timeout=PING_EVERY_S,
            close_timeout=1.0,
        )
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._authenticate(connection)
            await self._exchange(connection)
        finally:
            await connection.close()

    async def _authenticate(self, connection: ClientConnection) -> None:
        challenge = _decoded(await connection.recv())
        if isinstance(challenge, Challenge):
            await self._answer(connection, challenge, is_open=False)
            challenge = _decoded(await connection.recv())
        if not isinstance(challenge, Proven):
            raise OSError("the server sent no challenge; it may be another version of gpool")
        self._credentials.take(challenge)

    async def _answer(
        self, connection: ClientConnection, challenge: Challenge, *, is_open: bool
    ) -> None:
        proof = self._credentials.answer(challenge, is_open=is_open)
        if proof is None:
            raise OSError(f"the server sent an unexpected challenge: {challenge.purpose[:40]!r}")
        await connection.send(encode(proof))

    async def _exchange(self, connection: ClientConnection) -> None:
        self._outgoing.clear()
        self._open = connection
        self._feed(Connected())
        writer = asyncio.create_task(self._write(connection))
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._arrived(connection, await connection.recv())
            self._welcomed = True
            answer = connection.response
            request = None if answer is None else answer.headers.get(REQUEST_ID)
            log.info("channel_open", server=self._address.url, request=request)
            async for message in connection:
                await self._arrived(connection, message)
        finally:
            self._open = None
            writer.cancel()
            self._feed(Disconnected())
            await asyncio.wait([writer])

    async def _arrived(self, connection: ClientConnection, message: str | bytes) -> None:
        frame = _decoded(message)
        if isinstance(frame, Challenge):
            await self._answer(connection, frame, is_open=True)
        elif isinstance(frame, Proven):
            self._credentials.take(frame)
        else:
            self._feed(FrameArrived(frame))

    async def _write(self, connection: ClientConnection) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    frame = self._credentials.stamped(self._outgoing.popleft())
                    await connection.send(encode(frame))
        except WebSocketException:
            return


def _problem_code(response: Response) -> str:
    """Code of a refusal by the gpool server itself; "" for another answer, e.g. of a proxy before it."""
    try:
        found = msgspec.json.decode(response.body or b"", type=_Problem)
    except msgspec.MsgspecError:
        return ""
    return found.code


class _Problem(msgspec.Struct):
    code: str


def _retry_after_s(response: Response) -> float:
    """Seconds of `Retry-After`, at most `LONGEST_RETRY_AFTER_S`; 0 without one."""
    text = response.headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER_S) if text.isdecimal() else 0.0


def _is_writable(connection: ClientConnection) -> bool:
    is_open = connection.protocol.state is State.OPEN and not connection.transport.is_closing()
    return is_open and not connection.paused


def _decoded(message: str | bytes) -> FromServer:
    """Raise `GpoolError` for a final refusal, `OSError` for another."""
    frame = decode_any_from_server(message.encode() if isinstance(message, str) else message)
    if isinstance(frame, Refused):
        if not frame.retry:
            kind = BY_CODE.get(frame.code, GpoolError)
            if issubclass(kind, Invalid | TooLarge):  # the agent's own mistake, not its owner's
                kind = InternalFault
            raise kind(f"the server refused: {frame.detail}")
        raise OSError(f"the server refused for now: {frame.detail}")
    return frame
