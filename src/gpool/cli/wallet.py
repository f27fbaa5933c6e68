"""`gpool wallet`. Linking and unlinking require proof of wallet and account."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.core.errors import Invalid, Unprocessable

if TYPE_CHECKING:
    from gpool.client.transport import ApiTransport
    from gpool.wallet.signing import WalletKey
from gpool.cli.account import anonymous, password_of
from gpool.cli.command import as_json, client_of, quoted
from gpool.cli.printing import emit_json, table

STATEMENT = "Sign in to gpool."
_ADDRESS = re.compile(r"(?:0x)?([0-9a-fA-F]{40})")


def signed(api: ApiTransport, key_file: Path | None, address: str | None) -> dict[str, str]:
    """`Invalid` for a malformed address."""
    try:
        from gpool.wallet.signing import from_bytes
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
    from gpool.wallet.keystore import Keystore, read

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


key_option = click.option(
    "--wallet-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key file or keystore of the wallet (default: ask for a signature).",
)
proof_option = click.option(
    "--proof-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Authenticate with another linked wallet instead of the password.",
)


@click.group()
def wallet() -> None:
    """Manage the wallets of your account."""


@wallet.command("ls")
@as_json
@click.pass_context
def wallet_ls(ctx: click.Context, as_json: bool) -> None:
    """List your wallets."""
    found = client_of(ctx).api.get_json("/v1/wallets")["items"]
    if as_json:
        emit_json(found)
        return
    rows = [(one["address"], "yes" if one["payout"] else "", one["linked_at"]) for one in found]
    table(("address", "payout", "linked"), rows, "No wallets; link one with: gpool wallet link")


@wallet.command("link")
@click.argument("address", required=False)
@key_option
@proof_option
@as_json
@click.pass_context
def wallet_link(
    ctx: click.Context,
    address: str | None,
    wallet_key: Path | None,
    proof_key: Path | None,
    as_json: bool,
) -> None:
    """Link a wallet to your account."""
    document = _proved(ctx, address, wallet_key, proof_key)
    linked = client_of(ctx).api.send_json("POST", "/v1/wallets", document)
    if as_json:
        emit_json(linked)
    else:
        click.echo(f"Linked {linked['address']}.")


@wallet.command("unlink")
@click.argument("address")
@key_option
@proof_option
@click.pass_context
def wallet_unlink(
    ctx: click.Context, address: str, wallet_key: Path | None, proof_key: Path | None
) -> None:
    """Unlink a wallet; another way to sign in must remain."""
    import json

    document = _proved(ctx, address if wallet_key is None else None, wallet_key, proof_key)
    client_of(ctx).api.send(
        "DELETE",
        f"/v1/wallets/{quoted(address)}",
        body=json.dumps(document).encode(),
        headers={"content-type": "application/json"},
    )
    click.echo(f"Unlinked {address}.")


@wallet.command("payout")
@click.argument("address")
@click.option("--off", is_flag=True, help="Stop payouts to this wallet.")
@as_json
@click.pass_context
def wallet_payout(ctx: click.Context, address: str, off: bool, as_json: bool) -> None:
    """Select the wallet that receives payouts."""
    path = f"/v1/wallets/{quoted(address)}"
    changed = client_of(ctx).api.send_json("PATCH", path, {"payout": not off})
    if as_json:
        emit_json(changed)
    else:
        click.echo(
            f"{changed['address']} {'receives' if changed['payout'] else 'receives no'} payouts."
        )


def _proved(
    ctx: click.Context, address: str | None, wallet_key: Path | None, proof_key: Path | None
) -> dict[str, Any]:
    if (address is None) == (wallet_key is None):
        raise Invalid("name the wallet: give either ADDRESS or --wallet-key FILE")
    api = anonymous(ctx)
    document: dict[str, Any] = dict(signed(api, wallet_key, address))
    if proof_key is not None:
        document["proof"] = signed(api, proof_key, None)
    else:
        document["password"] = password_of("Password of your account")
    return document
