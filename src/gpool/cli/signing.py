"""Sign-in messages at the command line: signed with a key from disk, or printed for a wallet elsewhere to sign."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.core.errors import Invalid, Unprocessable

if TYPE_CHECKING:
    from gpool.client.connection.transport import Door
    from gpool.wallet.signing import WalletKey

STATEMENT = "Sign in to gpool."
_ADDRESS = re.compile(r"(?:0x)?([0-9a-fA-F]{40})")


def signed(door: Door, key_file: Path | None, address: str | None) -> dict[str, str]:
    """A fresh message for this pool, and its signature."""
    try:
        from gpool.wallet.address import from_bytes
    except ImportError as exc:
        raise Unprocessable("wallets need more packages: pip install 'gpool[wallet]'") from exc

    if key_file is not None:
        key = key_from(key_file)
        text = message_for(door, key.address)
        return {"message": text, "signature": str(key.sign(text.encode()))}
    match = _ADDRESS.fullmatch((address or "").strip())
    if match is None:
        raise Invalid(f"{(address or '')[:60]!r} is not an address; one is 0x and 40 hex digits")
    text = message_for(door, from_bytes(bytes.fromhex(match[1])))
    click.echo("Sign this message with your wallet (personal_sign), every line of it:\n", err=True)
    click.echo(text)
    click.echo("", err=True)
    pasted: str = click.prompt("Signature", err=True)
    return {"message": text, "signature": tidy(pasted)}


def message_for(door: Door, address: Any) -> str:
    from gpool.wallet import signin
    from gpool.wallet.moments import Moment

    asked = door.send_json("POST", "/v1/auth/wallet/nonce", {})
    return signin.format(
        signin.SignIn(
            domain=asked["domain"],
            address=address,
            uri=asked["uri"],
            chain_id=asked["chain_id"],
            nonce=asked["nonce"],
            statement=STATEMENT,
            issued_at=Moment(asked["issued_at"]),
            expires_at=Moment(asked["expires_at"]),
        )
    )


def key_from(path: Path) -> WalletKey:
    """A bare key, with a warning, or one behind a password."""
    from gpool.wallet.keyfile import read
    from gpool.wallet.keystore import Keystore

    found = read(path)
    for warning in found.warnings:
        click.echo(f"gpool: warning: {warning}", err=True)
    if not isinstance(found.content, Keystore):
        return found.content
    password: str = click.prompt(f"Password of {path}", hide_input=True, err=True)
    return found.content.decrypt(password)


def tidy(pasted: str) -> str:
    """A signature as wallets and terminals leave it: blanks, quotes, capitals, a missing 0x."""
    text = "".join(pasted.split()).strip("'\"`,;").lower()
    return text if text.startswith("0x") else f"0x{text}"
