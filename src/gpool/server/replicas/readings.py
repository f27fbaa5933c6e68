"""The loop `readings` of a replica: gives the readings it heard to the others, and takes theirs.

One row for all heartbeats of `EVERY_S`, compressed, and none without other replicas. Readings are samples: a row that
is lost, e.g. with its replica, is not missed.
"""

from __future__ import annotations

import zlib

import msgspec

from gpool.core.model import SECOND, Instant, Span
from gpool.observability.logs import get_logger
from gpool.server.nodes.telemetry import NodeReadings
from gpool.server.replicas.membership import Membership
from gpool.server.server import Server
from gpool.server.store.generated_rows import ReadingsRecord
from gpool.server.store.operations import readings
from gpool.server.wakeups import Wake

log = get_logger(__name__)

EVERY_S = 3.0
KEEP = Span(120 * SECOND)
"""A replica that starts reads the last two minutes."""

MAX_BYTES = 64 * 1024 * 1024
MAX_SEEN = 1000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[NodeReadings]).decode


class ExchangeReadings:
    name = "readings"

    def __init__(self, server: Server, membership: Membership) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server, self._membership = server, membership
        self._number = 0
        self._seen: dict[int, int] = {}  # by replica: the last row that was read

    async def run_once(self, now: Instant) -> None:
        unsent = self._server.telemetry.take_unsent()
        if not self._membership.others:
            return
        if unsent:
            self._number += 1
            body = zlib.compress(_encode(unsent), 1)
            row = ReadingsRecord(self._membership.id, self._number, now, body)
            await self._server.store.write(readings.put(row, Instant(now - KEEP)))
        found = readings.of_others(self._membership.id, self._seen)
        for row in await self._server.store.read(found):
            self._seen[row.replica_id] = row.number
            self._merge(row)
        if len(self._seen) > MAX_SEEN:  # rows of gone replicas are deleted by now
            others = self._membership.others
            self._seen = {id_: number for id_, number in self._seen.items() if id_ in others}

    def _merge(self, row: ReadingsRecord) -> None:
        try:
            plain = zlib.decompressobj().decompress(row.body, MAX_BYTES)
            for each in _decode(plain):
                self._server.telemetry.merge(each)
        except (zlib.error, msgspec.MsgspecError) as error:  # of a newer version
            log.warning("readings of another replica cannot be read", error=str(error))
