"""The agent's one WebSocket to the server: dials, dials again, passes frames. It knows no frame but `Refused`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from urllib.parse import urlsplit, urlunsplit

import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from gpool.agent.instructions import Connected, Disconnected, Event, FrameArrived
from gpool.core.errors import BY_CODE, GpoolError, NotSignedIn
from gpool.transfer.requests import Address
from gpool.wire.frames import (
    CHANNEL_PATH,
    MAX_FRAME_BYTES,
    AgentFrame,
    Malformed,
    Refused,
    decode_from_server,
    encode,
)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
OPEN_WITHIN_S = 10.0
ANSWER_WITHIN_S = 15.0
PING_EVERY_S = 10.0

log = structlog.get_logger(__name__)


def channel_url(address: Address) -> str:
    """`http://host:8000` becomes `ws://host:8000/v1/nodes/channel`."""
    parts = urlsplit(address.url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + CHANNEL_PATH, "", ""))


class Channel:
    """`feed` gets `Connected`, `FrameArrived` and `Disconnected`, in that order for each connection."""

    def __init__(
        self, address: Address, secret: str, feed: Callable[[Event], None], random: Random
    ) -> None:
        self._address = address
        self._secret = secret
        self._feed = feed
        self._random = random
        self._outgoing: deque[AgentFrame] = deque()
        self._wake = asyncio.Event()
        self._open = False
        self._welcomed = False

    def send(self, frame: AgentFrame) -> None:
        """Leaves in order as soon as the socket takes it; dropped when the channel is down."""
        if self._open:
            self._outgoing.append(frame)
            self._wake.set()

    async def keep(self) -> None:
        """Stay connected until cancelled; raises when the server will not have this agent."""
        delay = FIRST_DELAY_S
        while True:
            try:
                await self._converse()
            except InvalidStatus as error:
                status = error.response.status_code
                if status in (401, 403):
                    raise NotSignedIn(
                        f"{self._address.url} does not know this node's secret; join again with a new link"
                    ) from error
                log.warning("channel_refused", status=status, retry_s=round(delay, 2))
            except (OSError, WebSocketException, Malformed, TimeoutError) as error:
                what = str(error) or type(error).__name__
                log.warning("channel_lost", error=what, retry_s=round(delay, 2))
            if self._welcomed:
                delay, self._welcomed = FIRST_DELAY_S, False
            await asyncio.sleep(delay * self._random.uniform(0.5, 1.0))
            delay = min(LONGEST_DELAY_S, delay * 2)

    async def _converse(self) -> None:
        connection = await connect(
            channel_url(self._address),
            additional_headers={"Authorization": f"Bearer {self._secret}"},
            compression=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=64,
            open_timeout=OPEN_WITHIN_S,
            ping_interval=PING_EVERY_S,
            ping_timeout=PING_EVERY_S,
            close_timeout=1.0,
        )
        self._outgoing.clear()
        self._open = True
        self._feed(Connected())
        writer = asyncio.create_task(self._write(connection))
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                self._arrived(await connection.recv())
            self._welcomed = True
            log.info("channel_open", server=self._address.url)
            async for message in connection:
                self._arrived(message)
        finally:
            self._open = False
            writer.cancel()
            self._feed(Disconnected())
            await asyncio.wait([writer])
            await connection.close()

    def _arrived(self, message: str | bytes) -> None:
        if isinstance(message, str):
            message = message.encode()
        frame = decode_from_server(message)
        if isinstance(frame, Refused):
            if not frame.retry:
                raise BY_CODE.get(frame.code, GpoolError)(f"the server refused: {frame.detail}")
            raise OSError(f"the server refused for now: {frame.detail}")
        self._feed(FrameArrived(frame))

    async def _write(self, connection: ClientConnection) -> None:
        """A frame that cannot be sent any more is lost with its connection; the reader notices the end."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    await connection.send(encode(self._outgoing.popleft()))
        except WebSocketException:
            return
