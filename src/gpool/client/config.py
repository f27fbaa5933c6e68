"""Configuration of the client: server, credentials, rules for results, tokens of a sign-in session in a file of mode 0600.

Users of the file refresh one at a time; the second finds the new tokens there. The new pair is written before its use;
a refresh with a lost response is repeated with the same token, and the server returns the same successor.
One file because every setting comes from the same arguments, variables and profile.
"""

from __future__ import annotations

import json
import os
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpool.core.errors import BadGpuSpec, Invalid, NotSignedIn
from gpool.core.specs import gpu
from gpool.core.specs.fields import checked_project
from gpool.transfer.keys import parse_fingerprint, read_private, write_private
from gpool.transfer.requests import Address
from gpool.wire.values import MAX_VALUE_BYTES

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
        path = self.path.with_name(self.path.name + ".lock")
        try:
            import fcntl  # noqa: PLC0415 - Windows has none
        except ImportError:
            with _lock_file(path.with_name(path.name + "ed")):
                yield
            return
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


LOCKED_S = 60.0
"""Age after which a lock file counts as left behind by a process that was killed: longer than a refresh takes."""


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Lock by a file that exists while the lock is held, for systems without `flock`."""
    pause, ends = threading.Event(), time.monotonic() + LOCKED_S
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            break
        except FileExistsError:
            if time.monotonic() > ends:
                path.unlink(missing_ok=True)
            pause.wait(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


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


LOCAL_URL = "http://127.0.0.1:8642"
"""Default address of `gpool up`."""

LOCAL_PROFILE = "local"
_CREDENTIALS = ("key", "key_file", "session_file")


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """`origin`: where server and credentials were found."""

    url: str
    key: str = field(repr=False)
    origin: str = "defaults"
    fingerprint: str | None = None  # pinned server certificate; None: verified by an authority
    plain_http: bool = False  # keys may travel unencrypted
    session_file: Path | None = None  # tokens of a sign-in; a key takes precedence
    trust: tuple[str, ...] = ()  # teams whose members' nodes may send pickles: `team:NAME`
    max_value_bytes: int = MAX_VALUE_BYTES  # of a value from another account's node
    project: str = ""  # label of tasks that name none

    @property
    def address(self) -> Address:
        return Address(self.url, self.fingerprint, self.plain_http)


def home(environ: Mapping[str, str] | None = None) -> Path:
    """`GPOOL_HOME`, else the platform's configuration folder (`~/.config/gpool`)."""
    chosen = (os.environ if environ is None else environ).get("GPOOL_HOME", "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs  # noqa: PLC0415 - only needed without GPOOL_HOME, and not free

    return Path(platformdirs.user_config_path("gpool"))


def data_home(environ: Mapping[str, str] | None = None) -> Path:
    if (os.environ if environ is None else environ).get("GPOOL_HOME"):
        return home(environ) / "data"
    import platformdirs  # noqa: PLC0415 - only needed without GPOOL_HOME, and not free

    return Path(platformdirs.user_data_path("gpool"))


def load(
    url: str | None = None,
    key: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    profile: str | None = None,
    trust: Sequence[str] | None = None,
    max_value: str | int | None = None,
) -> ConnectionSettings:
    """Load the settings: arguments, then variables, then ./gpool.toml, then the user's profile.

    Credentials go to an address that the user chose: by argument or GPOOL_URL, or in the own config.toml. A key from
    a profile is used only with that profile's URL. ./gpool.toml comes with a cloned repository and is not trusted:
    it selects among the user's profiles, by name or URL, and names the project of its tasks.
    """
    environ = os.environ if environ is None else environ
    project_file = (directory or Path()) / "gpool.toml"
    user_file = home(environ) / "config.toml"
    user = _read(user_file)
    profiles = _table(user.get("profiles", {}), user_file)
    given_url = url or environ.get("GPOOL_URL")
    named = profile or environ.get("GPOOL_PROFILE")
    if not named and not given_url:
        named = _project_profile(project_file, profiles, user_file)
    name = named or user.get("profile")
    chosen = _profile(name, profiles, user_file) if name is not None else {}

    given_key = key or environ.get("GPOOL_KEY")
    given_print = environ.get("GPOOL_FINGERPRINT") or None
    plain = environ.get("GPOOL_PLAIN_HTTP", "") not in ("", "0")
    found_url = chosen.get("url")
    is_of_profile = found_url and (not given_url or _same_place(given_url, str(found_url)))
    own = chosen if is_of_profile else {}
    trusted = _teams(first_set(trust, environ.get("GPOOL_TRUST"), own.get("trust"), ()))
    max_bytes = _max_value(
        first_set(max_value, environ.get("GPOOL_MAX_VALUE"), own.get("max_value"), MAX_VALUE_BYTES)
    )
    project = _project_label(environ, project_file)
    if is_of_profile:
        return ConnectionSettings(
            _checked_url(given_url or str(found_url)),
            _checked_key(given_key or _key_of(chosen, user_file)),
            str(user_file),
            _print_of(given_print or chosen.get("fingerprint"), user_file),
            plain or chosen.get("plain_http") is True,
            session_file=None if given_key else _session_of(chosen, user_file),
            trust=trusted,
            max_value_bytes=max_bytes,
            project=project,
        )
    if not given_url and (joined := _joined_pool(home(environ))) is not None:
        key = _checked_key(given_key or "")
        return replace(joined, key=key, trust=trusted, max_value_bytes=max_bytes, project=project)
    return ConnectionSettings(
        _checked_url(given_url or LOCAL_URL),
        _checked_key(given_key or ""),
        "environment",
        _print_of(given_print, user_file),
        plain,
        trust=trusted,
        max_value_bytes=max_bytes,
        project=project,
    )


def _project_label(environ: Mapping[str, str], file: Path) -> str:
    """GPOOL_PROJECT, then `project` of the project's file; empty: none."""
    given, origin = environ.get("GPOOL_PROJECT", ""), "GPOOL_PROJECT"
    if not given:
        given, origin = _read(file).get("project", ""), str(file)
    if given == "":
        return ""
    try:
        return checked_project(str(given))
    except Invalid as exc:
        raise Invalid(f"{origin}: {exc.detail}") from exc


def first_set(*given: Any) -> Any:
    """First that is neither None nor an empty text: argument, variable, profile, default."""
    return next(one for one in given if one is not None and one != "")


def _teams(given: object) -> tuple[str, ...]:
    words = given if isinstance(given, (list, tuple)) else str(given).split(",")
    found = tuple(str(word).strip() for word in words)
    for word in found:
        if not word.removeprefix("team:") or not word.startswith("team:"):
            raise Invalid(
                f"trust (GPOOL_TRUST) holds {word[:60]!r}; write team:NAME, several of them with commas"
            )
    return found


def _max_value(given: object) -> int:
    try:
        size = given if type(given) is int else gpu.parse_bytes(str(given))
    except BadGpuSpec:
        size = 0
    if size < 1:
        raise Invalid(
            f"max_value (GPOOL_MAX_VALUE) is {str(given)[:60]!r}; write a size, like 200MB or 1GiB"
        )
    return size


def _project_profile(file: Path, profiles: Mapping[str, Any], user_file: Path) -> str | None:
    """Profile of the user that the project's file selects; `Invalid` if it tries to name more than that."""
    project = _read(file)
    for member in (*_CREDENTIALS, "fingerprint", "plain_http", "trust", "max_value"):
        if member in project:
            raise Invalid(
                f"{file}: {member!r} may not stand there, since a cloned repository could bring the file along; "
                f"keep it in a profile in {user_file} (gpool login writes one) or in a variable"
            )
    _refuse_unknown(
        project, {"url", "profile", "project", "tasks"}, file
    )  # `tasks`: read by `gpool run :NAME`
    name = project.get("profile")
    if name is not None:
        _profile(name, profiles, user_file)
    url = project.get("url")
    if not url:
        return name
    known = [
        each
        for each, table in profiles.items()
        if _same_place(str(url), str(_table(table, user_file).get("url", "")))
    ]
    if not known:
        raise Invalid(
            f"{file} names {_checked_url(str(url))}, which no profile in {user_file} has; nothing was sent there. "
            f"If you trust this pool, sign in once with: gpool --url {url} login; or set GPOOL_URL"
        )
    if name is not None and name not in known:
        raise Invalid(f"{file}: the profile {name!r} has another URL than {url}; leave one out")
    return name or known[0]


def _profile(name: object, profiles: Mapping[str, Any], file: Path) -> dict[str, Any]:
    if not isinstance(name, str) or name not in profiles:
        raise Invalid(
            f"there is no profile {name!r} in {file}; it has: {', '.join(profiles) or 'none'}"
        )
    return _table(profiles[name], file)


def _joined_pool(folder: Path) -> ConnectionSettings | None:
    """The pool that this machine has joined as a node, if exactly one; its link named the certificate."""
    files = sorted((folder / "nodes").glob("*.json"))
    if len(files) != 1:
        return None
    try:
        found = json.loads(files[0].read_text(encoding="utf-8"))
        url, pinned = _checked_url(str(found["url"])), found.get("fingerprint")
        plain = bool(found.get("plain"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # `gpool join` reports a damaged file
    return ConnectionSettings(url, "", str(files[0]), _print_of(pinned, files[0]), plain)


def _print_of(value: object, file: Path) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise Invalid(f"{file}: 'fingerprint' must be a text of 64 hexadecimal digits")
    return parse_fingerprint(value)


def save_profile(
    name: str,
    url: str,
    key_file: Path,
    *,
    folder: Path | None = None,
    fingerprint: str | None = None,
) -> Path:
    """Select the profile if none is selected; rules for results of a profile with this URL stay."""
    before = _with_url(name, url, (folder or home()) / "config.toml")
    kept = {key: value for key, value in before.items() if key in ("trust", "max_value")}
    members = {**kept, "url": url, "key_file": str(key_file), "fingerprint": fingerprint}
    return _save(name, members, folder, is_chosen=False)


def save_sign_in(
    name: str,
    url: str,
    session_file: Path,
    *,
    folder: Path | None = None,
    fingerprint: str | None = None,
) -> Path:
    """Select the profile; other members of a profile with this URL stay."""
    before = _with_url(name, url, (folder or home()) / "config.toml")
    kept = {key: value for key, value in before.items() if key not in ("key", "key_file")}
    members = {**kept, "url": url, "session_file": str(session_file)}
    if fingerprint is not None:
        members["fingerprint"] = fingerprint
    return _save(name, members, folder, is_chosen=True)


def _with_url(name: str, url: str, file: Path) -> dict[str, Any]:
    """Profile of this name, empty if it has another URL."""
    found = _table(_table(_read(file).get("profiles", {}), file).get(name, {}), file)
    return found if _same_place(url, str(found.get("url", ""))) else {}


def _save(
    name: str, members: Mapping[str, object], folder: Path | None, *, is_chosen: bool
) -> Path:
    import tomli_w  # noqa: PLC0415 - only `gpool up` and `login` write

    file = (folder or home()) / "config.toml"
    content = _read(file)
    profiles = _table(content.setdefault("profiles", {}), file)
    profiles[name] = {key: value for key, value in members.items() if value is not None}
    if is_chosen:
        content["profile"] = name
    else:
        content.setdefault("profile", name)
    write_config(file, tomli_w.dumps(content).encode())
    return file


def write_config(file: Path, content: bytes) -> None:
    """Write atomically with mode 0600."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise Invalid(f"{file} cannot be read: {exc}") from exc


def _table(value: object, file: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Invalid(f"{file}: 'profiles' must be tables, e.g. [profiles.local]")
    return value


def _refuse_unknown(table: Mapping[str, object], known: set[str], file: Path) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise Invalid(f"{file}: unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _key_of(table: Mapping[str, object], file: Path) -> str:
    if "key" in table:
        return str(table["key"])
    named = table.get("key_file")
    if not named:
        return ""
    path = file.parent / Path(str(named)).expanduser()
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise NotSignedIn(f"the key file {path} (named in {file}) cannot be read: {exc}") from exc


def _session_of(table: Mapping[str, object], file: Path) -> Path | None:
    named = table.get("session_file")
    return None if not named else file.parent / Path(str(named)).expanduser()


def forget_sign_in(session_file: Path, *, folder: Path | None = None) -> None:
    """Select the local profile again if it exists."""
    import tomli_w  # noqa: PLC0415 - only `gpool up` and `login` write

    file = (folder or home()) / "config.toml"
    content = _read(file)
    profiles = _table(content.get("profiles", {}), file)
    gone = [
        name
        for name, table in profiles.items()
        if _session_of(_table(table, file), file) == session_file
    ]
    for name in gone:
        del profiles[name]
    if content.get("profile") in gone:
        del content["profile"]
        if LOCAL_PROFILE in profiles:
            content["profile"] = LOCAL_PROFILE
    if gone:
        write_config(file, tomli_w.dumps(content).encode())


def _same_place(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of its port or its brackets
        is_whole = False
    if not is_whole:
        raise Invalid(f"{url!r} is not the URL of a pool; write it like {LOCAL_URL}")
    return url.rstrip("/")


def _checked_key(key: str) -> str:
    """Strip white space; an invalid key is not shown in the error."""
    found = key.strip()
    if not found.isascii() or not found.isprintable() or " " in found:
        raise Invalid("the key (GPOOL_KEY, --key or from a file) holds a character no key has")
    return found
