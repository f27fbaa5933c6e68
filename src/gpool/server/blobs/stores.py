"""`BlobStore`: the interface of a folder and of an S3 bucket, and the folder. A key is named by the store that made it.

A key is new for every stored object: removing an object, however late, cannot hit bytes stored since. Keys of a bucket
contain `/`, keys of a folder do not; those of earlier versions are the SHA-256.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from gpool.core.errors import NotFound

CHUNK_BYTES = 1024 * 1024


def is_in_folder(key: str) -> bool:
    return "/" not in key


class StoredObject(NamedTuple):
    key: str
    size: int
    modified: datetime


class BlobStore(Protocol):
    async def put(self, file: Path, sha256: str) -> str:
        """Store a file whose hash was checked, durably; return its key. The file may be moved."""
        ...

    def read(self, key: str, first: int, length: int) -> AsyncIterator[bytes]:
        """Bytes of an object; `NotFound` before the first one."""
        ...

    async def remove(self, key: str) -> None:
        """Delete an object; no error if there is none."""
        ...

    async def listed(self, shard: str) -> Sequence[StoredObject]:
        """All objects whose hash begins with `shard`, two hexadecimal digits."""
        ...


class FolderStore:
    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, key: str) -> Path:
        return self._root / key[:2] / key[2:4] / key

    async def put(self, file: Path, sha256: str) -> str:
        key = f"{sha256}-{secrets.token_hex(8)}"
        await asyncio.to_thread(self.publish, file, key)
        return key

    async def read(self, key: str, first: int, length: int) -> AsyncIterator[bytes]:
        try:
            descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"there is no artifact {key}") from None
        try:
            while length > 0:
                chunk = await asyncio.to_thread(
                    os.pread, descriptor, min(CHUNK_BYTES, length), first
                )
                if not chunk:
                    return
                first += len(chunk)
                length -= len(chunk)
                yield chunk
        finally:
            os.close(descriptor)

    async def remove(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    async def listed(self, shard: str) -> Sequence[StoredObject]:
        if not (self._root / shard).exists():
            return []
        return await asyncio.to_thread(self._listed, shard)

    def _listed(self, shard: str) -> list[StoredObject]:
        found = []
        for path in (self._root / shard).glob("*/*"):
            try:
                about = path.stat()
            except FileNotFoundError:  # removed meanwhile
                continue
            modified = datetime.fromtimestamp(about.st_mtime, UTC)
            found.append(StoredObject(path.name, about.st_size, modified))
        return found

    def publish(self, temporary: Path, key: str) -> None:
        final = self.path(key)
        final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.replace(final)
        for folder in (final.parent, final.parent.parent, self._root):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
