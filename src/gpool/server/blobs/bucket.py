"""The bucket of a pool: its place, its credentials, and names of new objects. Sends nothing."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from gpool.core.errors import Invalid
from gpool.server.blobs.signatures import S3Credentials

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class Bucket:
    """`endpoint` for the server, `public_endpoint` in URLs for agents and clients. Paths name the bucket."""

    name: str
    prefix: str  # empty, or ends with `/`
    endpoint: str
    public_endpoint: str
    credentials: S3Credentials

    def path(self, key: str = "") -> str:
        return f"/{self.name}" + (f"/{quote(self.prefix + key, safe='/-_.~')}" if key else "")


def bucket_of(place: str) -> tuple[str, str]:
    """(bucket, prefix) of `s3://BUCKET/PREFIX`; `Invalid` for anything else."""
    parts = urlsplit(place)
    prefix = parts.path.strip("/")
    if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise Invalid(f"{place[:200]!r} is not s3://BUCKET/PREFIX")
    return parts.netloc, f"{prefix}/" if prefix else ""


def credentials_of_environment(region: str) -> S3Credentials:
    access, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        raise Invalid(
            "the bucket needs a key: set GPOOL_SERVER_S3_ACCESS_KEY and GPOOL_SERVER_S3_SECRET_KEY, "
            "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return S3Credentials(access, secret, region, os.environ.get("AWS_SESSION_TOKEN", ""))


def new_key(sha256: str) -> str:
    return f"{sha256[:2]}/{sha256}-{secrets.token_hex(8)}"
