"""Authentication of nodes: join, channel, token renewal, requests. Authorization is not decided here.

A node's token is signed by the server and bound to the node's key: valid only on a connection that proved the key,
or beside a signature of the request (`proofs`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from gpool.core.errors import Invalid, NotSignedIn
from gpool.core.ids import NodeId, decode, encode
from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.node_proofs.proofs import KeyProof, NotProven, Proofs, is_sound
from gpool.server.identity.tokens.access import (
    LIFE_S,
    Claims,
    KeySet,
    TokenAudience,
    TokenGrant,
    TokenReader,
    TokenType,
    issue,
    new_key,
    thumbprint,
)
from gpool.server.store.operations.nodes import nodes
from gpool.server.store.protocol import Store
from gpool.server.store.values import NodeCredentials
from gpool.transfer.node_proofs import (
    ChallengeStatement,
    Purpose,
    RequestStatement,
    parse_request_proof,
    public_from,
)

JOIN_AGAIN = "this node is not known here by its key; join again with a new link"
LIFE = Span(LIFE_S[TokenType.NODE] * SECOND)
MAX_REMEMBERED = 10_000


def pool_name(root_key: bytes) -> str:
    """Name of the pool in proofs: derived from the root key, so unique and equal on every replica."""
    return "pool-" + hmac.new(root_key, b"gpool server name", hashlib.sha256).hexdigest()[:32]


def pool_keys(root_key: bytes) -> KeySet:
    seed = hmac.new(root_key, b"gpool node tokens", hashlib.sha256).digest()
    return KeySet((new_key(seed, Instant(0)),))


@dataclass(frozen=True, slots=True)
class IssuedToken:
    token: str
    at: Instant
    lives: Span


@dataclass(frozen=True, slots=True)
class _CachedNode:
    who: NodeCredentials
    until: Instant


class NodeAuthenticator:
    """`root_key`: shared by all replicas; `remember`: how long a removed node may still be accepted."""

    def __init__(
        self,
        store: Store,
        now: Callable[[], Instant],
        root_key: bytes,
        *,
        remember: Span,
    ) -> None:
        self.name = pool_name(root_key)
        self._store, self._now, self._remember = store, now, remember
        self._place = TokenAudience(self.name, self.name)
        self._keys = pool_keys(root_key)
        self._reader = TokenReader(self._keys, self._place)
        challenges = hmac.new(root_key, b"gpool challenges", hashlib.sha256).digest()
        self._proofs = Proofs(challenges, self.name)
        self._known: dict[NodeId, _CachedNode] = {}

    def forget(self) -> None:
        self._known.clear()

    async def node(self, id_: NodeId) -> NodeCredentials | None:
        now = self._now()
        known = self._known.get(id_)
        if known is not None and known.until > now:
            return known.who
        found = await self._store.read(nodes.credentials_of(id_))
        if found is None or found.public_key is None:
            return None
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[id_] = _CachedNode(found, Instant(now + self._remember))
        return found

    # ---- challenges

    def challenge(self, purpose: Purpose, node: NodeId | None = None) -> str:
        return self._proofs.challenge(purpose, _encoded(node), secrets.token_bytes(16), self._now())

    def joins(self, public_key: str, nonce: str, signature: str) -> KeyProof | NotProven:
        return self._answered(Purpose.JOIN, None, public_key, nonce, signature)

    def proves(
        self, who: NodeCredentials, purpose: Purpose, nonce: str, signature: str
    ) -> KeyProof | NotProven:
        return self._answered(purpose, who.node, who.public_key or "", nonce, signature)

    def _answered(
        self, purpose: Purpose, node: NodeId | None, public_key: str, nonce: str, signature: str
    ) -> KeyProof | NotProven:
        public = public_from(public_key)
        if public is None:
            return NotProven.KEY
        statement = ChallengeStatement(purpose, self.name, _encoded(node), public, nonce)
        return self._proofs.answered(statement, signature, self._now())

    # ---- tokens

    def token(self, who: NodeCredentials) -> IssuedToken:
        """The node has just proved its key."""
        public = public_from(who.public_key or "")
        assert public is not None, "the node has just signed with this key"
        now = self._now()
        grant = TokenGrant(TokenType.NODE, _encoded(who.node), key=thumbprint(public))
        made = issue(self._keys, self._place, grant, secrets.token_urlsafe(16), now)
        return IssuedToken(made, now, LIFE)

    def good_until(self, token: str, node: NodeId, key: str) -> Instant | None:
        """Expiry of the token for this node's frames on a connection that proved `key`; None if invalid there."""
        claims = self._claims(token)
        if claims is None or claims.key != key or claims.subject != _encoded(node):
            return None
        return Instant(claims.expires_at_s * SECOND)

    def _claims(self, token: str) -> Claims | None:
        found = self._reader.read(token, TokenType.NODE, self._now())
        return found if isinstance(found, Claims) else None

    # ---- requests

    async def requests(
        self, method: str, path: str, lease: str, token: str, proof: str
    ) -> NodeCredentials:
        """Authenticate a request by token and proof; else `NotSignedIn` without a reason."""
        claims = self._claims(token)
        if claims is None or parse_request_proof(proof) is None:
            raise _not_proven()
        who = await self.node(NodeId(decode("node", claims.subject)))
        public = public_from(who.public_key or "") if who is not None else None
        if who is None or public is None:
            raise _not_proven()
        statement = RequestStatement(self.name, method, path, token, 0, "", lease)
        found = self._proofs.request(statement, proof, public, claims, self._now())
        if isinstance(found, NotProven):
            raise _not_proven()
        return who


def checked_public_key(text: str) -> str:
    public = public_from(text)
    if public is None or not is_sound(public):
        raise Invalid(
            "'public_key' is not an Ed25519 public key: 32 bytes in base64url, 43 letters"
        )
    return text


def _encoded(node: NodeId | None) -> str:
    return "" if node is None else encode("node", node)


def _not_proven() -> NotSignedIn:
    return NotSignedIn(
        "the node's token or its proof is not valid; the agent gets a new token on its channel"
    )
