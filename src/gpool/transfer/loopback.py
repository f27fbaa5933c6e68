"""Receiver of one redirect on loopback, for a sign-in in a browser (RFC 8252). Only the expected state is accepted."""

from __future__ import annotations

import hmac
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from gpool.core.errors import NotSignedIn

POLL_S = 0.5
_DONE = b"Signed in. Return to the terminal; this window can be closed.\n"
_REFUSED = b"This is not the answer that the terminal waits for.\n"


class LoopbackReceiver:
    """Listens on a free port of 127.0.0.1 from its creation until `close`."""

    def __init__(self) -> None:
        self._server = _RedirectServer()

    @property
    def url(self) -> str:
        """Redirect URI."""
        return f"http://127.0.0.1:{self._server.server_port}/"

    def code(self, state: str, within_s: float) -> str:
        """Wait for the redirect with this state; `NotSignedIn` if the provider refused, or none came in time."""
        self._server.state = state
        deadline = time.monotonic() + within_s
        while self._server.answer is None:
            if time.monotonic() > deadline:
                raise NotSignedIn(f"no sign-in within {within_s:.0f} s; run the command again")
            self._server.handle_request()
        if "code" not in self._server.answer:
            why = self._server.answer.get("error_description") or self._server.answer.get("error")
            raise NotSignedIn(f"the provider did not sign you in: {str(why or 'no code')[:200]}")
        return self._server.answer["code"]

    def close(self) -> None:
        self._server.server_close()

    def __enter__(self) -> LoopbackReceiver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _RedirectServer(HTTPServer):
    timeout = POLL_S

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _RedirectHandler)
        self.state = ""
        self.answer: dict[str, str] | None = None


class _RedirectHandler(BaseHTTPRequestHandler):
    timeout = 5  # a client that sends nothing must not keep the browser out
    server: _RedirectServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        given = query.get("state", "").encode("utf-8", "replace")
        is_ours = parts.path == "/" and hmac.compare_digest(given, self.server.state.encode())
        if is_ours:
            self.server.answer = query
        body = _DONE if is_ours and "code" in query else _REFUSED
        self.send_response(200 if is_ours else 400)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the query holds a code."""
