"""Artifacts as objects of an S3 bucket, by obstore. Every stored object gets a key of its own.

A key is never used twice: a replica that deletes an object cannot hit one that another has stored meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from gpool.core.errors import NotFound, Unreachable
from gpool.server.blobs.bucket import Bucket, new_key
from gpool.server.blobs.stores import CHUNK_BYTES, StoredObject

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

log = logging.getLogger(__name__)

PUT_CHUNK_BYTES = 16 * CHUNK_BYTES


class S3Blobs:
    def __init__(self, bucket: Bucket) -> None:
        options: ClientConfig = {"timeout": "60s", "connect_timeout": "5s"}
        if bucket.endpoint.startswith("http:"):
            options["allow_http"] = True
        by = bucket.credentials
        config: S3Config = {
            "endpoint": bucket.endpoint,
            "region": by.region,
            "access_key_id": by.access_key,
            "secret_access_key": by.secret_key,
        }
        if by.token:
            config["session_token"] = by.token
        self._store = S3Store(
            bucket.name,
            prefix=bucket.prefix or None,
            config=config,
            client_options=options,
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=30)},
        )

    async def put(self, file: Path, sha256: str) -> str:
        key = new_key(sha256)
        try:
            await obstore.put_async(self._store, key, file, chunk_size=PUT_CHUNK_BYTES)
        except BaseError as error:
            raise _unreachable(error) from error
        return key

    async def read(self, key: str, first: int, length: int) -> AsyncIterator[bytes]:
        if length <= 0:
            await self.size_of(key)
            return
        try:
            found = await obstore.get_async(
                self._store, key, options={"range": (first, first + length)}
            )
            async for piece in found.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(piece)
        except FileNotFoundError:
            raise NotFound(f"there is no object {key}") from None
        except BaseError as error:
            raise _unreachable(error) from error

    async def size_of(self, key: str) -> int:
        """Size of an object; `NotFound` if there is none."""
        try:
            return (await obstore.head_async(self._store, key))["size"]
        except FileNotFoundError:
            raise NotFound(f"there is no object {key}") from None
        except BaseError as error:
            raise _unreachable(error) from error

    async def remove(self, key: str) -> None:
        try:
            await obstore.delete_async(self._store, key)
        except FileNotFoundError:
            return
        except BaseError as error:
            raise _unreachable(error) from error

    async def listed(self, shard: str) -> Sequence[StoredObject]:
        found: list[StoredObject] = []
        try:
            async for page in obstore.list(self._store, f"{shard}/"):
                found += (
                    StoredObject(each["path"], each["size"], each["last_modified"]) for each in page
                )
        except BaseError as error:
            raise _unreachable(error) from error
        return found


def _unreachable(error: BaseError) -> Unreachable:
    log.warning("the object store failed: %s", str(error)[:500])
    return Unreachable("the object store does not answer as expected; try again later")
