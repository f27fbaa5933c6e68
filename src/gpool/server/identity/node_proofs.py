"""Authentication of nodes: proofs that a node holds its key (challenges, signed requests), joining, token renewal.

Challenge. To join, to open the channel or to renew its token, a node signs a nonce of the server:

    nonce = 16 random bytes | expiry (8 bytes, µs) | first 16 bytes of HMAC(secret, nonce so far, purpose, server, node)

No list of challenges is kept: the tag shows that the nonce is the server's, for this node and purpose, and expires
30 s after creation. A million unanswered challenges cost no memory. Only nonces of accepted answers are remembered,
until they expire: a node that proves itself once a minute keeps half an entry on average.

Request. A request carries the node's token and a signature of method, path, token, lease, time and a random nonce by
the key the token is bound to; it is accepted once, within 60 s of its time. A stolen token is useless without the
key, a recorded request because its nonce is used.

Challenge and answer travel over one connection, so one process sees both. If an answer could reach another replica,
the memory would have to be a table with the nonce as primary key.

A node's token is signed by the server and bound to the node's key: valid only on a connection that proved the key,
or beside a signature of the request (`proofs`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gpool.core.errors import Forbidden, Invalid, NotSignedIn
from gpool.core.ids import NodeId, decode, encode
from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.access_tokens import (
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
from gpool.server.store.operations import nodes, replicas
from gpool.server.store.protocol import Store
from gpool.server.store.values import NodeCredentials
from gpool.transfer.node_proofs import (
    ChallengeStatement,
    Purpose,
    RequestStatement,
    parse_request_proof,
    public_from,
    signature_from,
)

CHALLENGE_LIFE = Span(30 * SECOND)
REQUEST_LIFE = Span(60 * SECOND)
"""Largest difference between a request's own time and ours, either way."""
MAX_REMEMBERED_PROOFS = 500_000
_RANDOM_BYTES, _TIME_BYTES, _TAG_BYTES = 16, 8, 16
_NONCE_BYTES = _RANDOM_BYTES + _TIME_BYTES + _TAG_BYTES


_WEAK = frozenset(
    bytes.fromhex(text)
    for text in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)
"""Points of small order, sign bit cleared: anybody can sign under such a key, so it proves nothing."""


class NotProven(StrEnum):
    FORM = "form"
    FOREIGN = "foreign"  # a challenge of another server, node or purpose
    STALE = "stale"
    USED = "used"
    SIGNATURE = "signature"
    KEY = "key"  # an unusable key, or not the one the token is bound to
    FULL = "full"  # the memory of used nonces is full; try again


@dataclass(frozen=True, slots=True)
class KeyProof:
    thumbprint: str


class UsedNonces:
    """Nonces of accepted proofs, until their expiry rejects a repeat anyway."""

    def __init__(self, most: int = MAX_REMEMBERED_PROOFS) -> None:
        self._used: set[tuple[str, str]] = set()
        self._order: deque[tuple[Instant, tuple[str, str]]] = deque()
        self._most = most

    def __len__(self) -> int:
        return len(self._used)

    def take(self, key: tuple[str, str], expires: Instant, now: Instant) -> NotProven | None:
        while self._order and self._order[0][0] <= now:
            self._used.discard(self._order.popleft()[1])
        if key in self._used:
            return NotProven.USED
        if len(self._used) >= self._most:
            return NotProven.FULL
        self._used.add(key)
        self._order.append((expires, key))
        return None


class Proofs:
    """`since`: proofs made earlier are stale, because the nonces used until then were lost with an earlier store."""

    def __init__(
        self,
        secret: bytes,
        server: str,
        memory: UsedNonces | None = None,
        since: Instant = Instant(0),  # noqa: B008 - a number
    ) -> None:
        self._secret, self._server = secret, server
        self._memory = memory if memory is not None else UsedNonces()
        self._since = since

    def challenge(self, purpose: str, node: str, entropy: bytes, now: Instant) -> str:
        """Nonce for one node and purpose, valid for `CHALLENGE_LIFE`; `entropy`: 16 random bytes."""
        if len(entropy) != _RANDOM_BYTES:
            raise ValueError(f"entropy must have {_RANDOM_BYTES} bytes, not {len(entropy)}")
        body = entropy + (now + CHALLENGE_LIFE).to_bytes(_TIME_BYTES, "big")
        raw = body + self._tag(body, purpose, node)
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    def answered(
        self, statement: ChallengeStatement, signature: str, now: Instant
    ) -> KeyProof | NotProven:
        """Whether the answer proves possession of `statement.public`, for this purpose and for the first time.

        The caller builds the statement from its store (node, key) and route (purpose); only the nonce is the peer's.
        """
        raw = signature_from(signature)
        nonce = _nonce(statement.nonce)
        if raw is None or nonce is None:
            return NotProven.FORM
        if not is_sound(statement.public):
            return NotProven.KEY
        body, tag = nonce[:-_TAG_BYTES], nonce[-_TAG_BYTES:]
        ours = self._tag(body, statement.purpose, statement.node)
        if statement.server != self._server or not hmac.compare_digest(tag, ours):
            return NotProven.FOREIGN
        expires = Instant(int.from_bytes(body[_RANDOM_BYTES:], "big"))
        if now >= expires or expires - CHALLENGE_LIFE < self._since:
            return NotProven.STALE
        if not _signed(statement.public, raw, statement.message()):
            return NotProven.SIGNATURE
        used = self._memory.take(("challenge", statement.nonce), expires, now)
        return used or KeyProof(thumbprint(statement.public))

    def request(
        self, statement: RequestStatement, header: str, public: bytes, claims: Claims, now: Instant
    ) -> KeyProof | NotProven:
        """Check the proof header of a request, which supplies time and nonce, against the key its token is bound to."""
        proof = parse_request_proof(header)
        raw = signature_from(proof.signature) if proof else None
        if proof is None or raw is None:
            return NotProven.FORM
        if claims.key is None or not hmac.compare_digest(claims.key, thumbprint(public)):
            return NotProven.KEY
        at = proof.at_s * SECOND
        if abs(now - at) > REQUEST_LIFE or at < self._since:
            return NotProven.STALE
        signed = replace(statement, at_s=proof.at_s, nonce=proof.nonce)
        if statement.server != self._server:
            return NotProven.FOREIGN
        if not _signed(public, raw, signed.message()):
            return NotProven.SIGNATURE
        expires = Instant(at + REQUEST_LIFE + SECOND)
        used = self._memory.take((claims.key, proof.nonce), expires, now)
        return used or KeyProof(claims.key)

    def _tag(self, body: bytes, purpose: str, node: str) -> bytes:
        facts = "\0".join((str(purpose), self._server, node)).encode("utf-8", "surrogatepass")
        digest = hmac.new(self._secret, b"gpool challenge 1\0" + body + facts, hashlib.sha256)
        return digest.digest()[:_TAG_BYTES]


def is_sound(public: bytes) -> bool:
    """Whether the key has 32 bytes and is not a point of small order."""
    return len(public) == 32 and public[:31] + bytes([public[31] & 0x7F]) not in _WEAK


def _nonce(text: str) -> bytes | None:
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    canonical = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return raw if len(raw) == _NONCE_BYTES and canonical == text else None


def _signed(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


JOIN_AGAIN = "this node is not known here by its key; join again with a new link"
TOKEN_LIFE = Span(LIFE_S[TokenType.NODE] * SECOND)
MAX_KNOWN_NODES = 10_000


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
    """`root_key`: shared by all replicas; `remember`: how long a removed node may still be accepted.

    `is_shared`: other servers accept proofs too, so each accepted one is recorded in the store. `since`: time of the
    store's restore from a backup, which has no proofs that were used before.
    """

    def __init__(
        self,
        store: Store,
        now: Callable[[], Instant],
        root_key: bytes,
        *,
        remember: Span,
        is_shared: bool = False,
        since: Instant = Instant(0),  # noqa: B008 - a number
    ) -> None:
        self._is_shared = is_shared
        self.name = pool_name(root_key)
        self._store, self._now, self._remember = store, now, remember
        self._place = TokenAudience(self.name, self.name)
        self._keys = pool_keys(root_key)
        self._reader = TokenReader(self._keys, self._place)
        challenges = hmac.new(root_key, b"gpool challenges", hashlib.sha256).digest()
        self._proofs = Proofs(challenges, self.name, since=since)
        self._known: dict[NodeId, _CachedNode] = {}

    def forget(self) -> None:
        self._known.clear()

    async def node(self, id_: NodeId) -> NodeCredentials | None:
        """Credentials of a node with a key; `Forbidden` if its owner may not lend."""
        now = self._now()
        known = self._known.get(id_)
        if known is not None and known.until > now:
            return known.who
        found = await self._store.read(nodes.credentials_of(id_))
        if found is None or found.public_key is None:
            return None
        if not found.may_lend:
            raise Forbidden(nodes.MAY_NOT_LEND)
        if len(self._known) >= MAX_KNOWN_NODES:
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
        return IssuedToken(made, now, TOKEN_LIFE)

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
        claims, parsed = self._claims(token), parse_request_proof(proof)
        if claims is None or parsed is None:
            raise _not_proven()
        who = await self.node(NodeId(decode("node", claims.subject)))
        public = public_from(who.public_key or "") if who is not None else None
        if who is None or public is None:
            raise _not_proven()
        statement = RequestStatement(self.name, method, path, token, 0, "", lease)
        found = self._proofs.request(statement, proof, public, claims, self._now())
        if isinstance(found, NotProven):
            raise _not_proven()
        if self._is_shared:
            expires = Instant(parsed.at_s * SECOND + REQUEST_LIFE + SECOND)
            taking = replicas.take_proof(found.thumbprint, parsed.nonce, expires)
            if not await self._store.write(taking):
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
