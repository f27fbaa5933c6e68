"""Clickjacking: another site frames the pool's pages in chromium; the same page without its headers is the control."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest
from playwright.sync_api import Browser, expect

from tests.tools.processes import PATIENCE_S, Pool


@contextmanager
def site(pages: dict[str, str]) -> Iterator[str]:
    """A site of its own origin that serves these pages by path."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path, "").encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("path", ["/sign-in", "/in/x", "/sign-in/oidc/back?code=x&state=x"])
def test_another_site_cannot_frame_a_page(chromium: Browser, pool: Pool, path: str) -> None:
    unprotected = httpx2.get(
        pool.address + path, headers={"accept": "text/html"}, timeout=PATIENCE_S
    ).text.replace(" data-submit", "")
    frames = f'<iframe id="victim" src="{pool.address}{path}"></iframe><iframe id="control" src="/copy"></iframe>'
    with site({"/": frames, "/copy": unprotected}) as evil, chromium.new_context() as context:
        page = context.new_page()
        page.goto(evil + "/")
        expect(page.frame_locator("#control").locator("form").first).to_be_visible()
        expect(page.frame_locator("#victim").locator("form")).to_have_count(0)
        assert [frame.url for frame in page.frames if frame.url.startswith(pool.address)] == []
