"""Sign-ins on disk: renewed once however many need it, and kept when an answer gets lost."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from gpool.client.config import SessionFile, SignInSession, Tokens
from gpool.client.transport import ApiTransport
from gpool.core.errors import NotSignedIn

URL = "http://pool.test"


class Server(httpx2.BaseTransport):
    """Takes only the newest access token; rotates as the real one does, and may lose answers."""

    def __init__(self, lose: int = 0) -> None:
        self.generation, self.refreshes, self.lose = 0, 0, lose
        self._turn = threading.Lock()
        self.over = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        with self._turn:
            if request.url.path == "/v1/auth/refresh":
                return self._refresh(json.loads(request.read()))
            if request.headers.get("authorization") != f"Bearer access-{self.generation}":
                return _answer(401, {"code": "not_signed_in", "detail": "no"})
            return _answer(200, {"generation": self.generation})

    def _refresh(self, document: dict[str, str]) -> httpx2.Response:
        self.refreshes += 1
        if self.over:
            return _answer(401, {"code": "not_signed_in", "detail": "over"})
        shown = int(document["refresh_token"].removeprefix("refresh-"))
        if shown == self.generation:
            self.generation += 1
        elif shown != self.generation - 1:
            return _answer(401, {"code": "not_signed_in", "detail": "reused"})
        if self.lose > 0:
            self.lose -= 1
            raise httpx2.ReadError("the line broke")
        return _answer(200, pair(self.generation))


def pair(generation: int) -> dict[str, str]:
    return {"access_token": f"access-{generation}", "refresh_token": f"refresh-{generation}"}


def _answer(status: int, document: object) -> httpx2.Response:
    return httpx2.Response(status, json=document)


@pytest.fixture
def file(tmp_path: Path) -> SessionFile:
    """A sign-in whose access token the server no longer takes."""
    file = SessionFile(tmp_path / "sessions" / "pool.json")
    file.write(Tokens("worn out", "refresh-0"))
    return file


def api(server: Server, file: SessionFile) -> ApiTransport:
    return ApiTransport(URL, "", server, session=SignInSession(file))


def test_a_refused_token_is_renewed_and_the_request_sent_again(file: SessionFile) -> None:
    server = Server()
    assert api(server, file).get_json("/v1/me") == {"generation": 1}
    assert file.read() == Tokens("access-1", "refresh-1")
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_lost_answer_signs_nobody_out(file: SessionFile) -> None:
    server = Server(lose=3)
    assert api(server, file).get_json("/v1/me") == {"generation": 1}
    assert server.refreshes == 4
    assert file.read() == Tokens("access-1", "refresh-1")


def test_many_threads_renew_once(file: SessionFile) -> None:
    server = Server()
    shared = api(server, file)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(shared.get_json("/v1/me"))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"generation": 1}] * 16
    assert server.refreshes == 1


def test_who_comes_second_takes_what_the_first_has_renewed(file: SessionFile) -> None:
    """Two processes that share a file: here two doors that have read it before."""
    server = Server()
    first, second = api(server, file), api(server, file)
    assert first.get_json("/v1/me") == second.get_json("/v1/me") == {"generation": 1}
    assert server.refreshes == 1


def test_the_lock_holds_between_processes(file: SessionFile) -> None:
    source = (
        "import fcntl, sys\n"
        "with open(sys.argv[1], 'w') as lock:\n"
        "    try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except BlockingIOError: sys.exit(7)\n"
    )
    command = [sys.executable, "-c", source, str(file.path) + ".lock"]
    with file.locked():
        assert subprocess.run(command, check=False).returncode == 7
    assert subprocess.run(command, check=False).returncode == 0


def test_a_sign_in_that_is_over_is_said_to_be(file: SessionFile) -> None:
    server = Server()
    server.over = True
    with pytest.raises(NotSignedIn, match="gpool login"):
        api(server, file).get_json("/v1/me")


def test_tokens_do_not_show(file: SessionFile) -> None:
    assert "refresh-0" not in repr(file.read())


def test_a_file_that_others_may_read_is_refused(file: SessionFile) -> None:
    file.path.chmod(0o644)
    with pytest.raises(Exception, match="chmod 600"):
        SignInSession(file)
