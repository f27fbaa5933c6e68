"""Verification of a sign-in message and its signature, composed as the server composes it."""

from __future__ import annotations

from gpool.core.model import Instant
from gpool.wallet import signin, signing
from gpool.wallet.signin import SignIn, SignInProblem, SignInReason
from gpool.wallet.signing import Signature


def verify(
    text: str, signature: str, *, domain: str, uri: str, chain_id: int, nonce: str, now: Instant
) -> SignIn | SignInProblem:
    """Return the message if all checks pass, else the problem; raises `BadSignIn` or `BadSignature`."""
    message = signin.parse(text)
    problem = signin.check(message, domain=domain, uri=uri, chain_id=chain_id, nonce=nonce, now=now)
    if problem is not None:
        return problem
    if signing.verify(text.encode(), Signature.parse(signature), message.address):
        return message
    return SignInProblem(
        SignInReason.WRONG_SIGNER, f"the signature is not one by {message.address} of this message"
    )
