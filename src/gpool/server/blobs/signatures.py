"""AWS Signature Version 4 of S3 requests: in headers for the server's own, in the query for presigned URLs.

obstore signs URLs, but neither headers nor multipart parameters (decision 0037). Pure: the time is an argument.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from gpool.core.model import SECOND, Instant

_ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class S3Credentials:
    access_key: str
    secret_key: str
    region: str
    token: str = ""  # of temporary credentials

    def __repr__(self) -> str:
        return f"S3Credentials({self.access_key!r}, region={self.region!r})"


@dataclass(frozen=True, slots=True)
class S3Request:
    """`url` without a query; `headers` are signed, and the sender must send exactly these."""

    method: str
    url: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


def presigned(request: S3Request, by: S3Credentials, at: Instant, lives_s: int) -> str:
    """Return the URL that permits this one request for `lives_s` seconds.

    A request with another value of a signed header, such as its length or checksum, does not match the signature.
    """
    headers = _named(request)
    parameters = {
        **request.query,
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{by.access_key}/{_scope(by, at)}",
        "X-Amz-Date": _stamp(at),
        "X-Amz-Expires": str(lives_s),
        "X-Amz-SignedHeaders": ";".join(headers),
    }
    if by.token:
        parameters["X-Amz-Security-Token"] = by.token
    query = encoded(parameters)
    signature = _signature(request, query, headers, UNSIGNED, by, at)
    return f"{request.url}?{query}&X-Amz-Signature={signature}"


def signed_headers(
    request: S3Request, body: bytes, by: S3Credentials, at: Instant
) -> dict[str, str]:
    """Return the headers with which the server itself sends the request."""
    digest = hashlib.sha256(body).hexdigest()
    added = {"x-amz-date": _stamp(at), "x-amz-content-sha256": digest}
    if by.token:
        added["x-amz-security-token"] = by.token
    whole = S3Request(request.method, request.url, request.query, {**request.headers, **added})
    headers = _named(whole)
    signature = _signature(whole, encoded(request.query), headers, digest, by, at)
    names = ";".join(headers)
    credential = f"{by.access_key}/{_scope(by, at)}"
    return {
        **whole.headers,
        "authorization": f"{_ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}",
    }


def encoded(query: Mapping[str, str]) -> str:
    return "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in sorted(query.items())
    )


def _named(request: S3Request) -> dict[str, str]:
    headers = {name.lower(): value.strip() for name, value in request.headers.items()}
    headers["host"] = urlsplit(request.url).netloc
    return dict(sorted(headers.items()))


def _stamp(at: Instant) -> str:
    return datetime.fromtimestamp(at // SECOND, UTC).strftime("%Y%m%dT%H%M%SZ")


def _scope(by: S3Credentials, at: Instant) -> str:
    return f"{_stamp(at)[:8]}/{by.region}/s3/aws4_request"


def _signature(
    request: S3Request,
    query: str,
    headers: Mapping[str, str],
    payload: str,
    by: S3Credentials,
    at: Instant,
) -> str:
    lines = [
        request.method,
        urlsplit(request.url).path,
        query,
        *(f"{name}:{value}" for name, value in headers.items()),
        "",
        ";".join(headers),
        payload,
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    text = "\n".join((_ALGORITHM, _stamp(at), _scope(by, at), digest))
    key = f"AWS4{by.secret_key}".encode()
    for part in (*_scope(by, at).split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()
