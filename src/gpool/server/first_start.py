"""The first start of a server: the operator's account and API key, and the root key of a single server."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gpool.core.errors import Conflict
from gpool.core.ids import UserId
from gpool.core.model import Permission
from gpool.server.identity import authorization
from gpool.server.replicas.shared_secrets import OPERATOR as OPERATOR_SECRET
from gpool.server.replicas.shared_secrets import SharedSecrets
from gpool.server.server import Server
from gpool.server.store.operations.identity import users as people
from gpool.server.store.values import User

OPERATOR = "operator"
OPERATOR_KEY_FILE = "operator.key"
ROOT_KEY_FILE = "server.key"


async def ensure_operator(server: Server) -> str:
    """Return the operator's API key from its file (mode 0600); create account and key if missing.

    Replicas share it: one without the file takes the key of the store, encrypted there.
    """
    path = server.settings.data / OPERATOR_KEY_FILE
    shared = SharedSecrets(server.store, server.sealer) if server.replica.id else None
    user = await _operator(server)
    key = _secret_in(path)
    if key is not None and await server.credentials.who(key) is not None:
        if shared is not None:
            await shared.keep(OPERATOR_SECRET, key.encode)
        return key
    stored = None if shared is None else await shared.find(OPERATOR_SECRET)
    if stored is not None and await server.credentials.who(stored.decode()) is not None:
        _write_secret(path, stored.decode())
        return stored.decode()
    key = authorization.fresh(authorization.USER_PREFIX)
    await server.store.write(
        people.add_key(
            server.ids.next(), user.id, "first start", authorization.hashed(key), server.now
        )
    )
    if shared is not None:
        await shared.replace(OPERATOR_SECRET, key.encode())
    _write_secret(path, key)
    return key


async def _operator(server: Server) -> User:
    user = await server.store.read(people.user_by_name(OPERATOR))
    if user is not None:
        return user
    made = User(UserId(server.ids.next()), OPERATOR, frozenset(Permission), server.now)
    try:
        await server.store.write(people.create_user(made))
    except Conflict:  # another replica starts at the same moment
        user = await server.store.read(people.user_by_name(OPERATOR))
        if user is None:
            raise
        return user
    return made


def _secret_in(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None


def _write_secret(path: Path, secret: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_root_key(data: Path) -> bytes:
    path = data / ROOT_KEY_FILE
    found = _secret_in(path)
    if found is None:
        found = secrets.token_hex(32)
        _write_secret(path, found)
    return bytes.fromhex(found)
