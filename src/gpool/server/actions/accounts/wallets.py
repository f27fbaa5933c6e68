"""Wallets: nonces, sign-in, linking and unlinking. A signature is valid once, for this server and its chain.

Contract wallets (EIP-1271) are verified on the configured chain, through `server.outbound`.
"""

from __future__ import annotations

import re
import secrets

from gpool.core.errors import Conflict, Forbidden, Invalid, NotFound, NotSignedIn, Unreachable
from gpool.core.model import Instant
from gpool.core.permissions import Action
from gpool.server.actions.accounts import accounts, sessions
from gpool.server.actions.accounts.accounts import FirstCredential, checksummed
from gpool.server.actions.audit import audited, entry, note_refused_sign_in
from gpool.server.identity.authorization import own, permit
from gpool.server.identity.passwords import Match
from gpool.server.server import Once, Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Account, Caller, LinkedWallet
from gpool.server.store.operations import gpus
from gpool.server.store.operations.identity import accounts as operations
from gpool.server.store.protocol import Operation, operation
from gpool.wallet import signin, signing
from gpool.wallet.errors import BadSignature
from gpool.wallet.moments import Moment
from gpool.wallet.signin import WalletPurpose
from gpool.wallet.signing import Address, Signature
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import (
    NonceDocument,
    SignedMessage,
    TokensDocument,
    WalletDocument,
    WalletLink,
    WalletSignIn,
    WalletUnlink,
)

NONCE_LETTERS = 24
_ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789"
_ADDRESS = re.compile(r"0x[0-9a-f]{40}")
_WORD = re.compile(r"0x(?:[0-9a-fA-F]{2})*")


async def nonce(server: Server, purpose: WalletPurpose) -> NonceDocument:
    made = "".join(secrets.choice(_ALPHABET) for _ in range(NONCE_LETTERS))
    now = server.now
    expires_at = Instant(now + span(server.settings.nonce_s))
    await server.write(operations.put_nonce(made, purpose.value, expires_at))
    return NonceDocument(
        nonce=made,
        domain=server.settings.address,
        uri=server.settings.origin,
        chain_id=server.settings.chain_id,
        issued_at=instant_to_datetime(now),
        expires_at=instant_to_datetime(expires_at),
    )


async def message(server: Server, address: str, purpose: WalletPurpose, account: str = "") -> str:
    """Message for a wallet in a page (EIP-4361), with a new nonce. It names the public origin, where the page must be open."""
    challenge = await nonce(server, purpose)
    return signin.format(
        signin.SignIn(
            domain=challenge.domain,
            address=signing.from_bytes(bytes.fromhex(_parsed(address)[2:])),
            uri=challenge.uri,
            chain_id=challenge.chain_id,
            nonce=challenge.nonce,
            statement=signin.statement_of(purpose, account),
            issued_at=Moment.of(server.now),
            expires_at=Moment.of(Instant(server.now + span(server.settings.nonce_s))),
        )
    )


async def sign_in(
    server: Server, request: WalletSignIn, label: str, origin: str = ""
) -> TokensDocument:
    account = await account_of(server, request, origin)
    return await sessions.open_session(server, account, label, origin, "wallet")


async def account_of(server: Server, request: WalletSignIn, origin: str = "") -> Account:
    """Account of the wallet that signed; created where registration allows it."""
    try:
        address = (await verified_wallet(server, request, WalletPurpose.SIGN_IN)).lower()
    except NotSignedIn:
        await note_refused_sign_in(server, origin, "wallet")
        raise
    account = await server.store.read(operations.user_by_wallet(address))
    if account is None:
        accounts.may_register(server, request.invite)
        account = await _first(server, address, request.invite)
    return account


async def _first(server: Server, address: str, invite: str | None) -> Account:
    """Create the account, named by the address, with a suffix if an account that the wallet left has that name."""
    for name in (address, f"{address}-{secrets.token_hex(4)}"):
        try:
            user = await accounts.create(server, name, FirstCredential(wallet=address), invite)
        except Conflict:
            found = await server.store.read(operations.user_by_wallet(address))
            if found is not None:
                return found  # concurrent first sign-ins
        else:
            return Account(user, None, None)
    raise Conflict(
        "the wallet's account could not be created because of a concurrent request; sign in again"
    )


# ---- verification


async def verified_wallet(
    server: Server, signed: SignedMessage, purpose: WalletPurpose, account: str = ""
) -> Address:
    """Signer of a message for this server, purpose and account; else `NotSignedIn`.

    Statement and nonce both name the purpose, so a signature for one is refused for another.
    """
    message = signin.parse(signed.message)
    settings = server.settings
    problem = signin.check(
        message,
        domain=settings.address,
        uri=settings.origin,
        chain_id=settings.chain_id,
        nonce=message.nonce,  # `take_nonce` checks that this server issued it
        now=server.now,
        statement=signin.statement_of(purpose, account),
    )
    if problem is not None:
        raise NotSignedIn(problem.detail)
    text = signed.message.encode()
    is_signer = False
    try:
        is_signer = signing.verify(text, Signature.parse(signed.signature), message.address)
    except BadSignature:
        if settings.chain_url is None:
            raise
    if not is_signer and settings.chain_url is None:
        raise NotSignedIn(f"the signature was not made by {message.address} for this message")
    if not await server.write(operations.take_nonce(message.nonce, purpose.value, server.now)):
        raise NotSignedIn(
            f"the nonce is unknown, used, expired or not for '{purpose}'; request a new one"
        )
    if not is_signer and not await _contract_accepts(
        server, message.address, text, signed.signature
    ):
        raise NotSignedIn(f"the signature was not made by {message.address} for this message")
    return message.address


async def _contract_accepts(server: Server, at: Address, text: bytes, signature: str) -> bool:
    assert server.settings.chain_url is not None
    data = signing.call_data(signing.personal_hash(text), signing.parse_signature(signature))
    call = {"to": at, "data": "0x" + data.hex()}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [call, "latest"]}
    try:
        answer = await server.identity.outbound.post_json(server.settings.chain_url, asked)
        document = answer.json()
    except Unreachable as error:
        raise Unreachable(
            "the chain endpoint does not answer; contract wallets cannot sign in now, try later"
        ) from error
    result = document.get("result") if isinstance(document, dict) else None
    if not isinstance(result, str) or not _WORD.fullmatch(result):
        return False  # the call reverted, or there is no contract
    return signing.says_yes(bytes.fromhex(result[2:]))


async def _prove_account(
    server: Server, who: Caller, request: WalletLink | WalletUnlink, other_than: str
) -> None:
    if request.password is not None:
        account = await server.store.read(operations.account(who.user.id))
        stored = None if account is None else account.password_hash
        async with server.guard.sign_in(who.user.name, who.address) as guess:
            found = await server.identity.passwords.verify(stored, request.password)
            if isinstance(found, Match):
                guess.succeeded()
        if not isinstance(found, Match):
            raise Forbidden("the password is wrong")
        return
    if request.proof is None:
        raise Invalid("'password' or 'proof' is required: a credential the account already has")
    signer = await verified_wallet(server, request.proof, WalletPurpose.APPROVE, who.user.name)
    address = signer.lower()
    linked = await server.store.read(operations.wallets_of(who.user.id))
    if address == other_than or address not in {wallet.address for wallet in linked}:
        raise Forbidden("the proof is not signed by another wallet of this account")


# ---- wallets of the caller


async def list_wallets(server: Server, who: Caller) -> list[WalletDocument]:
    permit(who, Action.ME_READ, own(who))
    found = await server.store.read(operations.wallets_of(who.user.id))
    return [_document(wallet) for wallet in found]


def _document(wallet: LinkedWallet) -> WalletDocument:
    return WalletDocument(
        address=checksummed(wallet.address),
        linked_at=instant_to_datetime(wallet.linked_at),
        payout=wallet.payout,
    )


async def link(
    server: Server, who: Caller, request: WalletLink, once: Once | None
) -> WalletDocument:
    permit(who, Action.WALLET_LINK, own(who))
    signer = await verified_wallet(server, request, WalletPurpose.LINK, who.user.name)
    address = signer.lower()
    await _prove_account(server, who, request, address)
    audit_entry = entry(server.now, who, "wallet.link", address)
    linking = audited(_link(who, address, server.now), [audit_entry])
    await server.write_once(who.user, once, linking, lambda _: b"")
    return await _one(server, who, address)


@operation
def _link(who: Caller, address: str, at: Instant) -> Operation[bool]:
    yield from operations.link_wallet(who.user.id, address, at)
    yield from gpus.rebind_wallet(who.user.id, (yield from operations.payout_wallet(who.user.id)))
    return True


async def unlink(
    server: Server, who: Caller, address: str, request: WalletUnlink, once: Once | None
) -> None:
    """Unlink a wallet. Takes two credentials, so that neither a stolen wallet nor a stolen password removes the other."""
    permit(who, Action.WALLET_UNLINK, own(who))
    wanted = _parsed(address)
    signer = await verified_wallet(server, request, WalletPurpose.UNLINK, who.user.name)
    if signer.lower() != wanted:
        raise Forbidden("the message is not signed by the wallet to be unlinked")
    await _prove_account(server, who, request, wanted)
    audit_entry = entry(server.now, who, "wallet.unlink", wanted)
    unlinking = audited(_unlink(who, wanted, server.now), [audit_entry])
    await server.write_once(who.user, once, unlinking, lambda _: b"")


@operation
def _unlink(who: Caller, address: str, at: Instant) -> Operation[bool]:
    if not (yield from operations.unlink_wallet(who.user.id, address, at)):
        raise _no_wallet(address)
    yield from gpus.rebind_wallet(who.user.id, (yield from operations.payout_wallet(who.user.id)))
    return True


async def set_payout(
    server: Server, who: Caller, address: str, payout: bool, once: Once | None
) -> WalletDocument:
    permit(who, Action.PAYOUT_WALLET_SET, own(who))
    wanted = _parsed(address)
    audit_entry = entry(server.now, who, "wallet.payout", wanted, payout=str(payout))
    change = audited(_set_payout(who, wanted, payout, server.now), [audit_entry])
    await server.write_once(who.user, once, change, lambda _: b"")
    return await _one(server, who, wanted)


@operation
def _set_payout(who: Caller, address: str, payout: bool, at: Instant) -> Operation[bool]:
    now = yield from operations.payout_wallet(who.user.id)
    linked = yield from operations.wallets_of(who.user.id)
    if address not in {wallet.address for wallet in linked}:
        raise _no_wallet(address)
    if payout or now == address:
        wanted = address if payout else None
        yield from operations.set_payout_wallet(who.user.id, wanted, at)
        yield from gpus.rebind_wallet(who.user.id, wanted)
    return True


async def _one(server: Server, who: Caller, address: str) -> WalletDocument:
    for wallet in await server.store.read(operations.wallets_of(who.user.id)):
        if wallet.address == address:
            return _document(wallet)
    raise _no_wallet(address)


def _parsed(address: str) -> str:
    lower = address.lower()
    if not _ADDRESS.fullmatch(lower):
        raise Invalid(f"{address[:80]!r} is not an address: 0x and 40 hexadecimal digits")
    return lower


def _no_wallet(address: str) -> NotFound:
    return NotFound(f"no wallet {address} of yours")
