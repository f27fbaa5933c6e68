"""Sign-in messages (EIP-4361), signed with a key file or by an external wallet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.core.errors import Invalid, Unprocessable

if TYPE_CHECKING:
    from gpool.client.connection.transport import ApiTransport
    from gpool.wallet.signing import WalletKey

STATEMENT = "Sign in to gpool."
_ADDRESS = re.compile(r"(?:0x)?([0-9a-fA-F]{40})")


def signed(api: ApiTransport, key_file: Path | None, address: str | None) -> dict[str, str]:
    """`Invalid` for a malformed address."""
    try:
        from gpool.wallet.address import from_bytes
    except ImportError as exc:
        raise Unprocessable("wallets need more packages: pip install 'gpool[wallet]'") from exc

    if key_file is not None:
        key = key_from(key_file)
        text = message_for(api, key.address)
        return {"message": text, "signature": str(key.sign(text.encode()))}
    match = _ADDRESS.fullmatch((address or "").strip())
    if match is None:
        raise Invalid(
            f"{(address or '')[:60]!r} is not a wallet address; write 0x and 40 hex digits"
        )
    text = message_for(api, from_bytes(bytes.fromhex(match[1])))
    click.echo("Sign this message with your wallet (personal_sign), all lines:\n", err=True)
    click.echo(text)
    click.echo("", err=True)
    pasted: str = click.prompt("Signature", err=True)
    return {"message": text, "signature": normalised_signature(pasted)}


def message_for(api: ApiTransport, address: Any) -> str:
    from gpool.wallet import signin
    from gpool.wallet.moments import Moment

    challenge = api.send_json("POST", "/v1/auth/wallet/nonce", {})
    return signin.format(
        signin.SignIn(
            domain=challenge["domain"],
            address=address,
            uri=challenge["uri"],
            chain_id=challenge["chain_id"],
            nonce=challenge["nonce"],
            statement=STATEMENT,
            issued_at=Moment(challenge["issued_at"]),
            expires_at=Moment(challenge["expires_at"]),
        )
    )


def key_from(path: Path) -> WalletKey:
    from gpool.wallet.keyfile import read
    from gpool.wallet.keystore import Keystore

    found = read(path)
    for warning in found.warnings:
        click.echo(f"gpool: warning: {warning}", err=True)
    if not isinstance(found.content, Keystore):
        return found.content
    password: str = click.prompt(f"Password of {path}", hide_input=True, err=True)
    return found.content.decrypt(password)


def normalised_signature(pasted: str) -> str:
    text = "".join(pasted.split()).strip("'\"`,;").lower()
    return text if text.startswith("0x") else f"0x{text}"
