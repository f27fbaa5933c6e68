"""Errors of this package: subclasses of `Invalid` with its wire code.

Invalid
├── BadAddress         not a 20-byte address in its EIP-55 spelling
├── BadSignature       not 65 bytes r, s, v with low s, or no key could have made it
├── BadMoment          not an RFC 3339 time
├── BadSignIn          not an EIP-4361 message; says which field and line
├── BadKey             not a private key of the curve
│   └── BadKeyFile     a file without a key, or with an excessive work factor
│       └── WrongPassword
├── BadTree            leaves or proofs that cannot belong to a Merkle tree
├── BadDocument        not canonical JSON as signed documents have it
├── BadReceipt         a receipt or a key history that is malformed, altered or not signed
└── BadPayout          a payout file that is malformed, or does not add up
"""

from __future__ import annotations

from gpool.core.errors import Invalid

SHOWN = 60


class BadAddress(Invalid):
    title = "Not an Ethereum address"


class BadSignature(Invalid):
    title = "Not a usable signature"


class BadMoment(Invalid):
    title = "Not an RFC 3339 time"


class BadSignIn(Invalid):
    """`field` is the name in `SignIn`; `line` counts from 1, 0 if there is no text yet."""

    title = "Not a sign-in message"

    def __init__(self, detail: str, *, field: str = "", line: int = 0) -> None:
        super().__init__(f"line {line}: {detail}" if line else detail, field=field, line=line)
        self.reason, self.field, self.line = detail, field, line


class BadKey(Invalid):
    title = "Not a private key"


class BadKeyFile(BadKey):
    title = "Not a usable key file"


class WrongPassword(BadKeyFile):
    title = "Wrong password"


class BadTree(Invalid):
    title = "Not a Merkle tree"


class BadDocument(Invalid):
    title = "Not a canonical JSON document"


class BadReceipt(Invalid):
    title = "Not a valid receipt"


class BadPayout(Invalid):
    title = "Not a valid payout file"


def shown(text: str) -> str:
    """Quote, escape and shorten untrusted text for a message."""
    cut = text[:SHOWN] + "…" if len(text) > SHOWN else text
    return "'" + cut.encode("unicode_escape").decode().replace("\\u2026", "…") + "'"
