"""Tokens of a sign-in session in a file of mode 0600, refreshed when the server rejects the access token.

Users of the file refresh one at a time; the second finds the new tokens there. The new pair is written before its use;
a refresh with a lost response is repeated with the same token, and the server returns the same successor.
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

EXPIRED = "your session has ended; sign in again with: gpool login"


@dataclass(frozen=True, slots=True)
class Tokens:
    access_token: str = field(repr=False)
    refresh_token: str = field(repr=False)

    @classmethod
    def of(cls, document: Any) -> Tokens:
        try:
            return cls(str(document["access_token"]), str(document["refresh_token"]))
        except (KeyError, TypeError) as exc:
            raise Invalid("the server's response to the sign-in holds no tokens") from exc


Renew = Callable[[str], Tokens]
"""Exchange a refresh token for the next pair; `NotSignedIn` if it is not valid."""


class SessionFile:
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
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.path.with_name(self.path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class SignInSession:
    """Thread-safe."""

    def __init__(self, file: SessionFile) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._tokens = file.read()

    @property
    def token(self) -> str | None:
        return None if self._tokens is None else self._tokens.access_token

    def renewed(self, rejected: str, renew: Renew) -> str:
        """`NotSignedIn` if the session has ended."""
        with self._lock:
            if self._tokens is not None and self._tokens.access_token != rejected:
                return self._tokens.access_token  # another thread was faster
            with self.file.locked():
                found = self.file.read()
                if found is None:
                    self._tokens = None
                    raise NotSignedIn(EXPIRED)
                if found.access_token == rejected:
                    found = renew(found.refresh_token)
                    self.file.write(found)
            self._tokens = found
            return found.access_token
