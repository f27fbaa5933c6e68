"""Sign-In with Ethereum (EIP-4361): build, format, parse and check messages; `format(parse(text)) == text`.

Stricter than the grammar where two texts would mean the same: no leading zeros in the chain id, no empty host, no
leap seconds. `signing` and `contracts` verify the signature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from gpool.core.model import Instant
from gpool.wallet import moments, signing
from gpool.wallet.errors import BadAddress, BadMoment, BadSignIn, shown
from gpool.wallet.moments import Moment
from gpool.wallet.signing import Address

MAX_LENGTH = 8192
MAX_AHEAD = 5 * 60 * 1_000_000
"""Tolerated lead of a client's clock: five minutes, in microseconds."""


class WalletPurpose(StrEnum):
    """Reason for which a server issued a nonce; a signature is good for that one only."""

    SIGN_IN = "sign_in"
    LINK = "link"  # by the wallet that is linked
    UNLINK = "unlink"  # by the wallet that is unlinked
    APPROVE = "approve"  # by another wallet of the account, to link or unlink one


_STATEMENTS = {
    WalletPurpose.SIGN_IN: "Sign in to gpool.",
    WalletPurpose.LINK: "Link this wallet to gpool account {account}.",
    WalletPurpose.UNLINK: "Unlink this wallet from gpool account {account}.",
    WalletPurpose.APPROVE: "Approve a change of the wallets of gpool account {account}.",
}


def statement_of(purpose: WalletPurpose, account: str = "") -> str:
    """Statement that a message for this purpose must contain; `account` is a user name."""
    return _STATEMENTS[purpose].format(account=account)


VERSION = "1"
_HEADER = " wants you to sign in with your Ethereum account:"
_STATEMENT = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;= ]+")
_CHAIN_ID = re.compile(r"0|[1-9][0-9]{0,77}")
_NONCE = re.compile(r"[A-Za-z0-9]{8,}")
_FOREIGN = re.compile(r"[^\n\x20-\x7e]")

_LABELS = {
    "uri": "URI: ",
    "version": "Version: ",
    "chain_id": "Chain ID: ",
    "nonce": "Nonce: ",
    "issued_at": "Issued At: ",
    "expires_at": "Expiration Time: ",
    "not_before": "Not Before: ",
    "request_id": "Request ID: ",
    "resources": "Resources:",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    """Message whose values are checked on construction: each can be formatted and parses back to itself.

    `request_id` and `resources` may be present and empty, which differs from absent.
    """

    domain: str
    address: Address
    uri: str
    chain_id: int
    nonce: str
    issued_at: Moment
    scheme: str | None = None
    statement: str | None = None
    expires_at: Moment | None = None
    not_before: Moment | None = None
    request_id: str | None = None
    resources: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, wrong in self._faults():
            raise BadSignIn(wrong, field=name)
        if (length := len(format(self))) > MAX_LENGTH:
            raise BadSignIn(f"the message has {length} characters; {MAX_LENGTH} are allowed")

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.scheme is not None and not moments.is_scheme(self.scheme):
            yield "scheme", f"{shown(self.scheme)} is not a URI scheme"
        if not moments.is_authority(self.domain, empty_host=False):
            yield "domain", f"{shown(self.domain)} is not a domain (RFC 3986 authority)"
        try:
            signing.parse(self.address)
        except BadAddress as exc:
            yield "address", exc.detail
        if self.statement is not None and not _STATEMENT.fullmatch(self.statement):
            yield (
                "statement",
                f"the statement {shown(self.statement)} {_statement_fault(self.statement)}",
            )
        if not moments.is_uri(self.uri):
            yield "uri", f"{shown(self.uri)} is not a URI (RFC 3986)"
        if not 0 <= self.chain_id < 1 << 256:
            yield "chain_id", "the chain id is not a number of 256 bits"
        if not _NONCE.fullmatch(self.nonce):
            yield "nonce", f"the nonce {shown(self.nonce)} is not 8 or more letters and digits"
        if self.request_id is not None and not moments.is_pchars(self.request_id):
            yield (
                "request_id",
                f"the request id {shown(self.request_id)} holds more than path characters",
            )
        for number, resource in enumerate(self.resources or ()):
            if not moments.is_uri(resource):
                yield f"resources.{number}", f"{shown(resource)} is not a URI (RFC 3986)"


def format(message: SignIn) -> str:
    lines = [
        (f"{message.scheme}://" if message.scheme is not None else "") + message.domain + _HEADER,
        message.address,
        "",
        *([message.statement] if message.statement is not None else []),
        "",
        f"URI: {message.uri}",
        f"Version: {VERSION}",
        f"Chain ID: {message.chain_id}",
        f"Nonce: {message.nonce}",
        f"Issued At: {message.issued_at}",
    ]
    if message.expires_at is not None:
        lines.append(f"Expiration Time: {message.expires_at}")
    if message.not_before is not None:
        lines.append(f"Not Before: {message.not_before}")
    if message.request_id is not None:
        lines.append(f"Request ID: {message.request_id}")
    if message.resources is not None:
        lines.append("Resources:")
        lines.extend(f"- {resource}" for resource in message.resources)
    return "\n".join(lines)


def parse(text: str) -> SignIn:
    """Parse a message; `BadSignIn` names the first wrong line."""
    _check_letters(text)
    return _Reading(text.split("\n")).message()


class SignInReason(StrEnum):
    WRONG_DOMAIN = "wrong_domain"
    WRONG_SCHEME = "wrong_scheme"
    WRONG_URI = "wrong_uri"
    WRONG_CHAIN = "wrong_chain"
    WRONG_STATEMENT = "wrong_statement"
    WRONG_NONCE = "wrong_nonce"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    ISSUED_AHEAD = "issued_ahead"
    WRONG_SIGNER = "wrong_signer"


@dataclass(frozen=True, slots=True)
class SignInProblem:
    reason: SignInReason
    detail: str


def check(
    message: SignIn,
    *,
    domain: str,
    uri: str,
    chain_id: int,
    nonce: str,
    now: Instant,
    statement: str | None = None,
) -> SignInProblem | None:
    """Check against the expected message and time; `statement` None: any. The store ensures that a nonce works once."""
    if message.domain != domain:
        return _problem(SignInReason.WRONG_DOMAIN, "domain", message.domain, domain)
    scheme = moments.scheme_of(uri)
    if message.scheme is not None and message.scheme.lower() != scheme:
        return _problem(SignInReason.WRONG_SCHEME, "scheme", message.scheme, scheme)
    if message.uri != uri:
        return _problem(SignInReason.WRONG_URI, "URI", message.uri, uri)
    if message.chain_id != chain_id:
        return _problem(SignInReason.WRONG_CHAIN, "chain id", message.chain_id, chain_id)
    if statement is not None and message.statement != statement:
        return SignInProblem(
            SignInReason.WRONG_STATEMENT,
            f"the message says {shown(message.statement or '')}, here it must say {shown(statement)}",
        )
    if message.nonce != nonce:
        return SignInProblem(
            SignInReason.WRONG_NONCE,
            "the message holds another nonce; ask for a new one and sign again",
        )
    if message.issued_at.at > now + MAX_AHEAD:
        return SignInProblem(
            SignInReason.ISSUED_AHEAD,
            f"the message was issued at {message.issued_at}, ahead of our clock ({Moment.of(now)}); set yours",
        )
    return check_times(message, now=now)


def check_times(message: SignIn, *, now: Instant) -> SignInProblem | None:
    """Valid from `not_before` until just before `expires_at`."""
    if message.expires_at is not None and now >= message.expires_at.at:
        return SignInProblem(
            SignInReason.EXPIRED, f"the message expired at {message.expires_at}; sign a new one"
        )
    if message.not_before is not None and now < message.not_before.at:
        return SignInProblem(
            SignInReason.NOT_YET_VALID, f"the message is not valid before {message.not_before}"
        )
    return None


def _problem(reason: SignInReason, name: str, found: object, asked: object) -> SignInProblem:
    return SignInProblem(
        reason, f"the message is for the {name} {shown(str(found))}, here it is {shown(str(asked))}"
    )


def _statement_fault(statement: str) -> str:
    if not statement:
        return "is empty; leave it out"
    if "\n" in statement:
        return "holds a line break"
    letter = next(each for each in statement if not _STATEMENT.fullmatch(each))
    return (
        f"holds {shown(letter)}; letters, digits, spaces and -._~:/?#[]@!$&'()*+,;= may stand in it"
    )


def _check_letters(text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise BadSignIn(f"the message has {len(text)} characters; {MAX_LENGTH} are allowed")
    foreign = _FOREIGN.search(text)
    if foreign is None:
        return
    line = text.count("\n", 0, foreign.start()) + 1
    column = foreign.start() - text.rfind("\n", 0, foreign.start())
    name = "a carriage return" if foreign[0] == "\r" else f"the character U+{ord(foreign[0]):04X}"
    raise BadSignIn(f"{name} at column {column}; only ASCII may stand here", line=line)


class _Reading:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._next = 0
        self._field = ""
        self._where: dict[str, int] = {}

    def message(self) -> SignIn:
        header = self._take("domain")
        if not header.endswith(_HEADER):
            raise self._wrong(f"{shown(header)} does not end with {_HEADER!r}")
        scheme, separator, rest = header.removesuffix(_HEADER).partition("://")
        self._where["scheme"] = self._next
        account = self._take("address")
        self._empty_line("after the address")
        statement = None
        if self._next < len(self._lines) and self._lines[self._next]:
            statement = self._take("statement")
        self._empty_line("before the URI")
        uri = self._labelled("uri")
        if (version := self._labelled("version")) != VERSION:
            raise self._wrong(f"the version is {shown(version)}; only {VERSION} is known")
        chain_id = self._labelled("chain_id")
        if not _CHAIN_ID.fullmatch(chain_id):
            raise self._wrong(
                f"{shown(chain_id)} is not a chain id: a number without leading zeros"
            )
        nonce = self._labelled("nonce")
        issued_at = self._moment("issued_at")
        expires_at = self._moment("expires_at") if self._follows("expires_at") else None
        not_before = self._moment("not_before") if self._follows("not_before") else None
        request_id = self._labelled("request_id") if self._follows("request_id") else None
        resources = self._resources() if self._follows("resources") else None
        self._end()
        try:
            return SignIn(
                domain=rest if separator else scheme,
                address=Address(account),
                uri=uri,
                chain_id=int(chain_id),
                nonce=nonce,
                issued_at=issued_at,
                scheme=scheme if separator else None,
                statement=statement,
                expires_at=expires_at,
                not_before=not_before,
                request_id=request_id,
                resources=resources,
            )
        except BadSignIn as exc:
            line = self._where.get(exc.field, 0)
            raise BadSignIn(exc.reason, field=exc.field, line=line) from exc

    def _take(self, field: str) -> str:
        if self._next >= len(self._lines):
            raise BadSignIn(
                f"the message ends where the {field} should stand", field=field, line=self._next
            )
        line = self._lines[self._next]
        self._next += 1
        self._field, self._where[field] = field, self._next
        return line

    def _wrong(self, detail: str) -> BadSignIn:
        return BadSignIn(detail, field=self._field, line=self._next)

    def _empty_line(self, where: str) -> None:
        if line := self._take("empty line"):
            raise self._wrong(f"there must be an empty line {where}, not {shown(line)}")

    def _follows(self, field: str) -> bool:
        return self._next < len(self._lines) and self._lines[self._next].startswith(_LABELS[field])

    def _labelled(self, field: str) -> str:
        label = _LABELS[field]
        line = self._take(field)
        if not line.startswith(label):
            raise self._wrong(f"{label!r} must stand here, not {shown(line)}")
        return line.removeprefix(label)

    def _moment(self, field: str) -> Moment:
        try:
            return Moment(self._labelled(field))
        except BadMoment as exc:
            raise self._wrong(exc.detail) from exc

    def _resources(self) -> tuple[str, ...]:
        if rest := self._labelled("resources"):
            raise self._wrong(f"{shown(rest)} after 'Resources:'; each stands on its own line")
        found: list[str] = []
        while self._next < len(self._lines) and self._lines[self._next].startswith("- "):
            found.append(self._take(f"resources.{len(found)}").removeprefix("- "))
        return tuple(found)

    def _end(self) -> None:
        if self._next >= len(self._lines):
            return
        line = self._take("end")
        known = any(line.startswith(label) for label in _LABELS.values())
        place = "stands out of order or twice" if known else "follows the end of the message"
        raise self._wrong(f"{shown(line)} {place}")
