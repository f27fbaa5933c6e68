"""Signatures as obstore and Amazon make them, and refused by a real store when anything signed differs."""

from __future__ import annotations

from datetime import datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import obstore
import pytest
from obstore.store import S3Store

from gpool.core.model import SECOND, Instant
from gpool.server.blobs.signatures import S3Credentials, S3Request, presigned, signed_headers

BY = S3Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1")
AT = Instant(int(datetime.fromisoformat("2013-05-24T00:00:00Z").timestamp()) * SECOND)
HOST = "https://examplebucket.s3.amazonaws.com"


def test_a_presigned_url_is_the_one_of_amazon_s_manual() -> None:
    url = presigned(S3Request("GET", f"{HOST}/test.txt", {}, {}), BY, AT, 86_400)
    assert url.endswith(
        "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )


def test_signed_headers_are_those_of_amazon_s_manual() -> None:
    request = S3Request("GET", f"{HOST}/test.txt", {}, {"Range": "bytes=0-9"})
    found = signed_headers(request, b"", BY, AT)["authorization"]
    assert found.endswith(
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
    listing = S3Request("GET", f"{HOST}/", {"max-keys": "2", "prefix": "J"}, {})
    found = signed_headers(listing, b"", BY, AT)["authorization"]
    assert found.endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )


@pytest.mark.parametrize("token", ["", "a/token+of=STS"])
@pytest.mark.parametrize("key", ["ab/cd-1", "a prefix/ab+c"])
def test_a_presigned_url_is_the_one_of_obstore(key: str, token: str) -> None:
    by = S3Credentials("key", "secret", "eu-west-3", token)
    store = S3Store(
        "pool",
        endpoint="https://store.test:9000",
        access_key_id=by.access_key,
        secret_access_key=by.secret_key,
        region=by.region,
        **({"session_token": token} if token else {}),
    )
    oracle = obstore.sign(store, "PUT", key, timedelta(seconds=60))
    stamp = parse_qs(urlsplit(oracle).query)["X-Amz-Date"][0]
    at = Instant(int(datetime.strptime(f"{stamp}+0000", "%Y%m%dT%H%M%SZ%z").timestamp()) * SECOND)
    request = S3Request("PUT", oracle.partition("?")[0], {}, {})
    mine = presigned(request, by, at, 60)
    assert parse_qs(urlsplit(mine).query) == parse_qs(urlsplit(oracle).query)


def test_credentials_do_not_print_their_secret() -> None:
    assert "wJalr" not in repr(BY)
