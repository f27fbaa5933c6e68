"""The agent's WebSocket to a server of its pool: connects, authenticates, reconnects with backoff, forwards frames.

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
from urllib.parse import urlsplit, urlunsplit

import msgspec
import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.http11 import Response
from websockets.protocol import State

from gpool.agent.addresses import ServerAddresses
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
from gpool.transfer.keys import (
    WrongCertificate,
    pinned_context,
    write_private,
    wrong_certificate,
)
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
    encode,
)
from gpool.wire.tolerance import read_from_server

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


LONGEST_RETRY_AFTER_S = 300.0
OPEN_WITHIN_S = 10.0
ANSWER_WITHIN_S = 15.0
PING_EVERY_S = 5.0
"""Also the time for the answer: a server that hangs is left after 10 s, so that leases outlive the move to another."""

log = structlog.get_logger(__name__)


def channel_url(address: Address) -> str:
    parts = urlsplit(address.url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + CHANNEL_PATH, "", ""))


def _tls(address: Address) -> ssl.SSLContext | bool | None:
    if not address.url.startswith("https://"):
        return None
    return True if address.fingerprint is None else pinned_context(address.fingerprint)


class RefusedForNow(OSError):
    """`to`: address of a server that the refusing one recommends; may be empty."""

    def __init__(self, detail: str, to: str) -> None:
        super().__init__(f"the server refused for now: {detail}")
        self.to = to


class AgentChannel:
    """Feeds `Connected`, `FrameArrived` and `Disconnected`, in this order per connection."""

    def __init__(
        self,
        addresses: ServerAddresses,
        credentials: AgentCredentials,
        feed: Callable[[Event], None],
    ) -> None:
        for address in addresses:
            address.refuse_if_open()
        self._addresses = addresses
        self._credentials = credentials
        self._tls = {address.url: _tls(address) for address in addresses}
        self._feed = feed
        self._outgoing: deque[AgentFrame] = deque()
        self._wake = asyncio.Event()
        self._open: ClientConnection | None = None
        self._was_open = False  # since this process started
        self._untrusted: set[str] = set()  # addresses with another certificate than the pinned one

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
        """Stay connected until cancelled; raise `GpoolError` when the server refuses the node's key."""
        while True:
            url = self._addresses.current.url
            retry_after_s, recommended, status = 0.0, "", None
            try:
                await self._connect()
                why = "the connection was closed"
            except InvalidStatus as error:
                _raise_if_final(error, url)
                retry_after_s, status = _retry_after_s(error.response), error.response.status_code
                why = str(error)
            except RefusedForNow as error:
                why, recommended = str(error), error.to
            except (OSError, WebSocketException, Malformed, TimeoutError) as error:
                why = str(error) or type(error).__name__
                if (wrong := wrong_certificate(error)) is not None:
                    self._distrust(url, wrong)
            pause_s = self._addresses.failed(asyncio.get_running_loop().time(), retry_after_s)
            if recommended and self._addresses.moved(recommended):
                log.info("channel_moves", server=url, to=recommended)
            else:
                event = "channel_lost" if status is None else "channel_refused"
                log.warning(event, server=url, error=why, status=status, retry_s=round(pause_s, 2))
            await asyncio.sleep(pause_s)

    def _distrust(self, url: str, wrong: WrongCertificate) -> None:
        """Raise `Forbidden` if no address ever had the pinned certificate. Later a proxy of the network may show its own."""
        self._untrusted.add(url)
        if not self._was_open and self._untrusted == self._tls.keys():
            raise Forbidden(f"{url}: {wrong}") from wrong

    async def _connect(self) -> None:
        address = self._addresses.current
        connection = await connect(
            channel_url(address),
            additional_headers={NODE_HEADER: self._credentials.identity.node},
            ssl=self._tls[address.url],
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
            self._was_open = True
            self._addresses.connected()
            answer = connection.response
            request = None if answer is None else answer.headers.get(REQUEST_ID)
            log.info("channel_open", server=self._addresses.current.url, request=request)
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
        elif frame is None:
            log.debug("unknown_frame_left_out")
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


def _raise_if_final(error: InvalidStatus, url: str) -> None:
    """Raise `GpoolError` if the gpool server itself refuses this node's key or owner."""
    code = _problem_code(error.response)
    if code == Forbidden.code:
        raise Forbidden(
            f"{url} refuses this node: its owner's account is disabled or may not lend; ask an operator of the pool"
        ) from error
    if code == NotSignedIn.code:
        raise NotSignedIn(
            f"{url} does not know this node's key; join again with a new link: gpool join LINK"
        ) from error


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


def _decoded(message: str | bytes) -> FromServer | None:
    """None: a kind of frame that this release does not know. Raise `GpoolError` for a final refusal, `OSError` for another."""
    frame = read_from_server(message.encode() if isinstance(message, str) else message)
    if isinstance(frame, Refused):
        if not frame.retry:
            kind = BY_CODE.get(frame.code, GpoolError)
            if issubclass(kind, Invalid | TooLarge):  # the agent's own mistake, not its owner's
                kind = InternalFault
            raise kind(f"the server refused: {frame.detail}")
        raise RefusedForNow(frame.detail, frame.to)
    return frame
