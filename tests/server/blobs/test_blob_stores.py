"""One contract for the folder and for a real S3 bucket."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from gpool.core.errors import NotFound, Unreachable
from gpool.core.model import MIB
from gpool.server.blobs.s3 import S3Blobs
from gpool.server.blobs.stores import BlobStore, FolderStore
from gpool.server.settings import Settings
from tests.tools.object_store import ObjectServer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "artifacts")
    server: ObjectServer = request.getfixturevalue("object_store")
    bucket = Settings(**server.settings(secrets.token_hex(8))).bucket
    assert bucket is not None
    return S3Blobs(bucket)


@pytest.fixture
def spooled(tmp_path: Path) -> Callable[[bytes], tuple[Path, str]]:
    """A file as an upload leaves it, with its hash."""

    def spool(content: bytes) -> tuple[Path, str]:
        file = tmp_path / "artifacts" / f"{secrets.token_hex(4)}.tmp"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        return file, hashlib.sha256(content).hexdigest()

    return spool


async def read(store: BlobStore, key: str, first: int, length: int) -> bytes:
    return b"".join([piece async for piece in store.read(key, first, length)])


@pytest.mark.parametrize("size", [0, 1, 5000, 40 * MIB], ids=str)
async def test_what_was_put_is_read_whole_and_by_range(
    store: BlobStore, spooled: Callable[[bytes], tuple[Path, str]], size: int
) -> None:
    content = secrets.token_bytes(size)
    key = await store.put(*spooled(content))
    assert await read(store, key, 0, size) == content
    assert await read(store, key, size // 2, size - size // 2) == content[size // 2 :]
    assert await read(store, key, size // 3, size // 3) == content[size // 3 : 2 * (size // 3)]


async def test_a_removed_object_is_gone_and_may_be_removed_again(
    store: BlobStore, spooled: Callable[[bytes], tuple[Path, str]]
) -> None:
    key = await store.put(*spooled(b"content"))
    await store.remove(key)
    with pytest.raises(NotFound):
        await read(store, key, 0, 7)
    await store.remove(key)


async def test_a_shard_lists_its_objects_and_no_others(
    store: BlobStore, spooled: Callable[[bytes], tuple[Path, str]]
) -> None:
    file, sha256 = spooled(b"listed")
    key = await store.put(file, sha256)
    [found] = await store.listed(sha256[:2])
    assert (found.key, found.size) == (key, 6)
    other = f"{(int(sha256[:2], 16) + 1) % 256:02x}"
    assert list(await store.listed(other)) == []


async def test_an_object_stored_again_in_a_bucket_has_another_key(
    object_store: ObjectServer, spooled: Callable[[bytes], tuple[Path, str]]
) -> None:
    """So removing the first, however late, leaves the second."""
    bucket = Settings(**object_store.settings(secrets.token_hex(8))).bucket
    assert bucket is not None
    store = S3Blobs(bucket)
    first, second = await store.put(*spooled(b"same")), await store.put(*spooled(b"same"))
    await store.remove(first)
    assert await read(store, second, 0, 4) == b"same"


async def test_a_store_that_does_not_answer_is_said_to_be_unreachable(
    object_store: ObjectServer, spooled: Callable[[bytes], tuple[Path, str]]
) -> None:
    wrong = {**object_store.settings("x"), "s3_secret_key": "another"}
    bucket = Settings(**wrong).bucket
    assert bucket is not None
    with pytest.raises(Unreachable, match="object store"):
        await S3Blobs(bucket).put(*spooled(b"content"))
