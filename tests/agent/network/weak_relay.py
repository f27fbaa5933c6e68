"""A relay that defends nothing, for the control: one key both ways, no seal looked at, no number remembered, no address asked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from gpool.agent.network.gang.datagrams import HEAD, SEAL_BYTES, Bond, Piece, _derived
from gpool.agent.network.gang.relay import Member, Relay


class WeakBond(Bond):
    __slots__ = ("_key",)

    def __init__(self, secret: bytes, own: int, rank: int, session: bytes) -> None:
        super().__init__(secret, own, rank, session)
        self._key = _derived(secret, b"", "data")

    def _take(self, session: bytes) -> None:
        super()._take(session)
        self._to_them = SimpleNamespace(encrypt=self._encrypt)  # type: ignore[assignment]

    def _stream(self, head: bytes, text: Piece) -> bytes:
        work = Cipher(AES(self._key), CTR(bytes(2) + head[2:] + bytes(4))).encryptor()
        return work.update(text) + work.finalize()

    def _encrypt(self, head: bytes, text: Piece, _: None) -> bytes:
        return self._stream(head, text) + bytes(SEAL_BYTES)

    def open(self, datagrams: Iterable[memoryview]) -> Iterator[list[Piece]]:
        for datagram in datagrams:
            head = bytes(datagram[: HEAD.size])
            yield [self._stream(head, datagram[HEAD.size : -SEAL_BYTES])]


class WeakRelay(Relay):
    bond = WeakBond

    def _deliver(self, _: Member, pieces: list[Piece]) -> None:
        with contextlib.suppress(OSError):  # what the kernel takes for no packet at all
            os.writev(self._tun, pieces)
