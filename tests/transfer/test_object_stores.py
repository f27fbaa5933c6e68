"""Which URLs of an object store an agent or client dials, though a server it must not trust has named them."""

from __future__ import annotations

import pytest

from gpool.core.errors import Invalid, Unreachable
from gpool.transfer.object_stores import StoreAccess, listed_origins, request_to
from gpool.transfer.requests import Address, Request

FAR = Address("https://pool.example")
NEAR = Address("http://127.0.0.1:8642")


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:9000/pool/x",
        "https://localhost/pool/x",
        "https://10.0.0.5/pool/x",
        "https://192.168.1.1/admin",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]/x",
        "https://[fd00::1]/x",
        "https://[::ffff:10.0.0.5]/x",
        "http://1.1.1.1/unencrypted",
        "file:///etc/passwd",
        "not a url",
    ],
)
def test_a_server_elsewhere_cannot_name_an_address_here(url: str) -> None:
    with pytest.raises(Unreachable):
        StoreAccess(FAR, frozenset()).destination(url)


def test_a_public_address_is_dialled_as_it_was_checked() -> None:
    found = StoreAccess(FAR, frozenset()).destination("https://1.1.1.1/pool/x?a=b")
    assert found.address == "1.1.1.1"
    sent = request_to(found, Request("GET", "", to_store=True), b"", {})
    assert (sent.url.host, sent.headers["host"]) == ("1.1.1.1", "1.1.1.1")
    assert sent.url.raw_path == b"/pool/x?a=b"


def test_a_listed_origin_is_dialled_wherever_it_is() -> None:
    access = StoreAccess(FAR, listed_origins("http://10.0.0.5:9000, https://store.lan"))
    assert access.destination("http://10.0.0.5:9000/pool/x").address == ""
    with pytest.raises(Unreachable, match="GPOOL_AGENT_STORES"):
        access.destination("http://10.0.0.5:9001/pool/x")


def test_a_server_on_this_machine_may_name_a_store_on_it() -> None:
    assert StoreAccess(NEAR, frozenset()).destination("http://127.0.0.1:9000/x").address == ""
    with pytest.raises(Unreachable, match="not encrypted"):
        StoreAccess(NEAR, frozenset()).destination("http://10.0.0.5:9000/x")


def test_a_store_that_failed_is_left_out_for_a_while() -> None:
    access = StoreAccess(NEAR, frozenset())
    access.destination("http://127.0.0.1:9000/x")  # the control
    access.failed("http://127.0.0.1:9000/x")
    with pytest.raises(Unreachable, match="a moment ago"):
        access.destination("http://127.0.0.1:9000/y")
    access.destination("http://127.0.0.1:9001/y")


def test_only_headers_of_presigned_urls_are_sent() -> None:
    """Otherwise a server could use a client's connection for requests of its own making."""
    found = StoreAccess(NEAR, frozenset()).destination("http://127.0.0.1:9000/x")
    headers = {
        "content-length": "1",
        "x-amz-checksum-sha256": "c",
        "Range": "bytes=1-",
        "Host": "other",
        "Cookie": "c",
        "Authorization": "a",
    }
    sent = request_to(found, Request("PUT", "", headers, to_store=True), b"x", {})
    assert sent.headers["host"] == "127.0.0.1:9000"
    assert {"cookie", "authorization"}.isdisjoint(sent.headers)
    assert sent.headers["x-amz-checksum-sha256"] == "c"


def test_a_list_of_origins_names_its_fault() -> None:
    with pytest.raises(Invalid, match=r"10\.0\.0\.5"):
        listed_origins("10.0.0.5:9000")
