"""The pool's own origin, other sites, safe redirects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.server.web.origins import OwnNames, is_same_origin, own_origin, safe_next

NAMES = OwnNames("https://pool.example", frozenset({"vega"}))


@pytest.mark.parametrize(
    ("scheme", "host", "origin"),
    [
        ("http", "pool.example", "https://pool.example"),  # behind a proxy that ends TLS
        ("https", "10.0.0.7:8642", "https://10.0.0.7:8642"),  # listening on all addresses
        ("http", "127.0.0.1:8642", "http://127.0.0.1:8642"),
        ("http", "LOCALHOST:8642", "http://localhost:8642"),
        ("https", "[::1]:8642", "https://[::1]:8642"),
        ("https", "vega:8642", "https://vega:8642"),
        ("http", "evil.example:8642", None),  # a name rebound to this address
        ("http", "pool.example.evil.example", None),
        ("http", "a b", None),
        ("http", "", None),
    ],
)
def test_own_origin_is_known_by_the_host(scheme: str, host: str, origin: str | None) -> None:
    found = own_origin(NAMES, scheme, host)
    assert (None if found is None else found.text) == origin


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({"origin": "http://127.0.0.1:8642", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "http://127.0.0.1:8642"}, True),
        ({"origin": "https://pool.example"}, True),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, False),
        ({"origin": "http://127.0.0.1:9000", "sec-fetch-site": "same-site"}, False),
        ({"origin": "http://127.0.0.1:8642", "sec-fetch-site": "cross-site"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "same-origin"}, False),
        ({}, False),
    ],
)
def test_forms_of_other_sites_are_told_apart(headers: dict[str, str], is_own: bool) -> None:
    own = own_origin(NAMES, "http", "127.0.0.1:8642")
    assert is_same_origin(headers, own, NAMES.public) is is_own


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/a\\b",
        "/\tevil",
        "/a\r\nSet-Cookie: x=1",
        "",
        "tasks",
        "/sign-in?next=/",
        "/in/code",
        "/" + "a" * 600,
    ],
)
def test_a_redirect_never_leaves_the_server(target: str) -> None:
    assert safe_next(target) == "/"


@given(st.text(max_size=80))
def test_every_target_is_one_path(text: str) -> None:
    target = safe_next(text)
    assert target.startswith("/")
    assert not target.startswith(("//", "/\\"))
    assert target.isprintable()
    assert "\\" not in target


def test_a_path_with_a_query_is_kept() -> None:
    assert safe_next("/tasks?status=failed&page=t-0") == "/tasks?status=failed&page=t-0"
