"""A sign-in on disk: its tokens, for their owner only, renewed when the server says they are over.

Threads and processes that share a sign-in renew it one at a time: who comes second finds the new tokens in the file. The
new pair is on disk before it is used, and a refresh whose answer got lost is sent again with the same token, to which
the server gives the same answer; so an honest client is not signed out by a broken line.
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpool.core.errors import Invalid, NotSignedIn
from gpool.transfer.private_files import read_private, write_private

OVER = "your sign-in is over; sign in again with: gpool login"


@dataclass(frozen=True, slots=True)
class Tokens:
    access_token: str = field(repr=False)
    refresh_token: str = field(repr=False)

    @classmethod
    def of(cls, document: Any) -> Tokens:
        """From a sign-in's answer."""
        try:
            return cls(str(document["access_token"]), str(document["refresh_token"]))
        except (KeyError, TypeError) as exc:
            raise Invalid("the server's answer to the sign-in holds no tokens") from exc


Renew = Callable[[str], Tokens]
"""The next pair for a refresh token; `NotSignedIn` when it is no longer good."""


class SessionFile:
    """Where a sign-in is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Tokens | None:
        try:
            return Tokens.of(json.loads(read_private(self.path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise NotSignedIn(f"{self.path} cannot be read ({exc}); sign in again") from exc

    def write(self, tokens: Tokens) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        document = {"access_token": tokens.access_token, "refresh_token": tokens.refresh_token}
        write_private(self.path, json.dumps(document).encode(), replace=True)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else renews meanwhile, on this machine."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.path.with_name(self.path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class SignInSession:
    """The tokens in use. Safe to share between threads."""

    def __init__(self, file: SessionFile) -> None:
        self.file = file
        self._turn = threading.Lock()
        self._tokens = file.read()

    @property
    def token(self) -> str | None:
        return None if self._tokens is None else self._tokens.access_token

    def renewed(self, refused: str, renew: Renew) -> str:
        """Another access token than the one that was refused; `NotSignedIn` when there is none to be had."""
        with self._turn:
            if self._tokens is not None and self._tokens.access_token != refused:
                return self._tokens.access_token  # another thread was faster
            with self.file.locked():
                found = self.file.read()
                if found is None:
                    self._tokens = None
                    raise NotSignedIn(OVER)
                if found.access_token == refused:
                    found = renew(found.refresh_token)
                    self.file.write(found)
            self._tokens = found
            return found.access_token
