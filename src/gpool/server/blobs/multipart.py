"""Multipart uploads of a bucket, which agents and clients fill by presigned URLs. Each URL takes one part.

Number, length and SHA-256 of the part are signed, so a URL cannot store other bytes; after the upload was completed or
aborted it stores nothing. `probe` tests that the store keeps to this before any URL is given away.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

import httpx2

from gpool.core.errors import Invalid, Unreachable
from gpool.core.model import MIB, Instant
from gpool.server.blobs.bucket import Bucket, new_key
from gpool.server.blobs.signatures import S3Request, encoded, presigned, signed_headers

log = logging.getLogger(__name__)

PART_BYTES = 16 * MIB
MOST_PARTS = 9_000  # S3 accepts 10,000
URL_LIFE_S = 900
TIMEOUT_S = 30.0
VERIFIED_AT_ONCE = 2
"""Uploads read back at a time."""
_NO_HEADERS: Mapping[str, str] = {}


class SignedRequest(NamedTuple):
    """`headers` must be sent as they are."""

    url: str
    headers: Mapping[str, str]


class StoredPart(NamedTuple):
    number: int
    size: int
    etag: str


class OpenUpload(NamedTuple):
    key: str
    upload_id: str
    began: datetime


def part_bytes_of(size: int) -> int:
    """Length of every part but the last of an artifact of `size` bytes."""
    needed = -(-size // MOST_PARTS)
    return max(PART_BYTES, -(-needed // MIB) * MIB)


def part_sizes(size: int) -> list[int]:
    length = part_bytes_of(size)
    return [min(length, size - first) for first in range(0, size, length)]


class MultipartUploads:
    """`now`: the time of day, which the store compares with its own."""

    def __init__(self, bucket: Bucket, now: Callable[[], Instant]) -> None:
        self._bucket, self._now = bucket, now
        self._http = httpx2.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self.completions: dict[str, asyncio.Task[int]] = {}
        """Completions in progress by key; a request that comes again joins its own."""
        self.verifying = asyncio.Semaphore(VERIFIED_AT_ONCE)
        self.is_ready = False
        """The store has passed `probe`."""

    async def close(self) -> None:
        for task in list(self.completions.values()):
            task.cancel()
            await asyncio.wait([task])
        await self._http.aclose()

    # ---- URLs for others

    def part_url(
        self,
        key: str,
        upload_id: str,
        number: int,
        size: int,
        sha256: str,
        endpoint: str | None = None,
    ) -> SignedRequest:
        """URL that takes one part; `endpoint`: other than the public one."""
        headers = {
            "content-length": str(size),
            "x-amz-checksum-sha256": _base64(sha256),
        }
        query = {"partNumber": str(number), "uploadId": upload_id}
        url = (endpoint or self._bucket.public_endpoint) + self._bucket.path(key)
        return SignedRequest(self._signed(S3Request("PUT", url, query, headers)), headers)

    def read_url(self, key: str) -> str:
        url = self._bucket.public_endpoint + self._bucket.path(key)
        return self._signed(S3Request("GET", url, {}, {}))

    def _signed(self, request: S3Request) -> str:
        return presigned(request, self._bucket.credentials, self._now(), URL_LIFE_S)

    # ---- requests of the server

    async def begin(self, key: str) -> str:
        """Return the upload's id."""
        sha256 = {"x-amz-checksum-algorithm": "SHA256"}
        answer = await self._send("POST", key, {"uploads": ""}, headers=sha256)
        return _text(_xml(answer), "UploadId")

    async def parts(self, key: str, upload_id: str) -> list[StoredPart] | None:
        """Stored parts by number; None if the upload was completed or aborted."""
        found: list[StoredPart] = []
        marker = "0"
        while True:
            query = {"uploadId": upload_id, "part-number-marker": marker}
            answer = await self._send("GET", key, query, missing=True)
            if answer is None:
                return None
            tree = _xml(answer)
            for part in _all(tree, "Part"):
                number, size = int(_text(part, "PartNumber")), int(_text(part, "Size"))
                found.append(StoredPart(number, size, _text(part, "ETag")))
            if _text(tree, "IsTruncated") != "true":
                return found
            marker = _text(tree, "NextPartNumberMarker")

    async def complete(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], sha256s: Sequence[str]
    ) -> None:
        """Make the object of its parts; `Invalid` if the store has parts with other checksums."""
        root = ElementTree.Element("CompleteMultipartUpload")
        for part, sha256 in zip(parts, sha256s, strict=True):
            each = ElementTree.SubElement(root, "Part")
            ElementTree.SubElement(each, "PartNumber").text = str(part.number)
            ElementTree.SubElement(each, "ETag").text = part.etag
            ElementTree.SubElement(each, "ChecksumSHA256").text = _base64(sha256)
        body = ElementTree.tostring(root)
        answer = await self._send("POST", key, {"uploadId": upload_id}, body, refusal=True)
        if answer is None:
            raise Invalid(
                "the object store has other parts than these checksums name; delete the upload and begin again"
            )
        if _xml(answer).tag.rpartition("}")[2] == "Error":  # S3 may send it after a 200
            raise Unreachable(
                "the object store did not complete the upload; continue it in a moment"
            )

    async def abort(self, key: str, upload_id: str) -> None:
        await self._send("DELETE", key, {"uploadId": upload_id}, missing=True)

    async def unfinished(self) -> list[OpenUpload]:
        found: list[OpenUpload] = []
        marker: dict[str, str] = {}
        while True:
            query = {"uploads": "", "prefix": self._bucket.prefix, **marker}
            tree = _xml(await self._send("GET", "", query))
            for each in _all(tree, "Upload"):
                key = _text(each, "Key").removeprefix(self._bucket.prefix)
                began = datetime.fromisoformat(_text(each, "Initiated"))
                found.append(OpenUpload(key, _text(each, "UploadId"), began))
            if _text(tree, "IsTruncated") != "true":
                return found
            marker = {
                "key-marker": _text(tree, "NextKeyMarker"),
                "upload-id-marker": _text(tree, "NextUploadIdMarker"),
            }

    async def probe(self) -> None:
        """Test that the store refuses a part with other bytes or another length than were signed; set `is_ready`."""
        if self.is_ready:
            return
        try:
            fault = await self._fault()
        except Unreachable as error:
            fault = error.detail
        if fault:
            log.warning("artifacts go through the server, not straight to the store: %s", fault)
        self.is_ready = not fault

    async def _fault(self) -> str:
        right, wrong = b"right", b"wrong"
        digest = hashlib.sha256(right).hexdigest()
        key = new_key(digest)
        upload_id = await self.begin(key)
        try:
            own = self._bucket.endpoint  # the public one may not be reachable from here
            signed = self.part_url(key, upload_id, 1, len(right), digest, own)
            for what, body in (("other bytes", wrong), ("a longer body", right + wrong)):
                headers = {**signed.headers, "content-length": str(len(body))}
                if (await self._request("PUT", signed.url, headers, body)).is_success:
                    return f"it stores {what} under a signed length and checksum"
            answer = await self._request("PUT", signed.url, signed.headers, right)
            if not answer.is_success:
                return f"it refuses a presigned part ({answer.status_code}: {answer.text[:200]})"
        finally:
            await self.abort(key, upload_id)
        answer = await self._request("PUT", signed.url, signed.headers, right)
        return "it stores parts of an aborted upload" if answer.is_success else ""

    async def _send(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        body: bytes = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
        *,
        missing: bool = False,
        refusal: bool = False,
    ) -> bytes | None:
        """Body of the answer; None if it is 404 and `missing` permits it, or 400 and `refusal` does."""
        url = self._bucket.endpoint + self._bucket.path(key)
        request = S3Request(method, url, query, headers)
        signed = signed_headers(request, body, self._bucket.credentials, self._now())
        answer = await self._request(method, f"{url}?{encoded(query)}", signed, body)
        if answer.is_success:
            return answer.content
        if (missing and answer.status_code == 404) or (refusal and answer.status_code == 400):
            return None
        log.warning("the object store answered %s: %s", answer.status_code, answer.text[:500])
        raise Unreachable(f"the object store answered {answer.status_code}; try again later")

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> httpx2.Response:
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                return await self._http.request(method, url, headers=dict(headers), content=body)
        except (httpx2.HTTPError, TimeoutError) as error:
            what = str(error) or type(error).__name__
            host = urlsplit(url).netloc
            raise Unreachable(f"the object store at {host} does not answer ({what})") from error


def _base64(sha256: str) -> str:
    return base64.b64encode(bytes.fromhex(sha256)).decode()


def _xml(answer: bytes | None) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(answer or b"")
    except ElementTree.ParseError as error:
        raise Unreachable("the object store answered something that is not XML") from error


def _all(tree: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return tree.findall(f"{{*}}{name}")


def _text(tree: ElementTree.Element, name: str) -> str:
    found = tree.find(f"{{*}}{name}")
    return (found.text or "") if found is not None else ""
