"""One question: did the address in this sign-in message sign exactly this text, and is it the sign-in we asked for?
Contract wallets (EIP-1271) are asked by the server; `contracts` has the pure halves of that.
"""

from __future__ import annotations

from gpool.core.model import Instant
from gpool.wallet import signin, signing
from gpool.wallet.signin import Problem, Reason, SignIn
from gpool.wallet.signing import Signature


def verify(
    text: str, signature: str, *, domain: str, uri: str, chain_id: int, nonce: str, now: Instant
) -> SignIn | Problem:
    """The message, when all holds; what is wrong with it otherwise. `BadSignIn` or `BadSignature` when it is not even one.

    The hash is taken of the text as it came, which is also the only text the parsed message can be written as.
    """
    message = signin.parse(text)
    problem = signin.check(message, domain=domain, uri=uri, chain_id=chain_id, nonce=nonce, now=now)
    if problem is not None:
        return problem
    if signing.verify(text.encode(), Signature.parse(signature), message.address):
        return message
    return Problem(
        Reason.WRONG_SIGNER, f"the signature is not one by {message.address} of this message"
    )
