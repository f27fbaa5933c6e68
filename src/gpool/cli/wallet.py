"""`gpool wallet`. Linking and unlinking require proof of wallet and account."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.core.errors import Forbidden, Invalid, Unprocessable
from gpool.transfer.requests import origin_of

if TYPE_CHECKING:
    from gpool.client.transport import ApiTransport
    from gpool.wallet.signin import WalletPurpose
    from gpool.wallet.signing import WalletKey
from gpool.cli.account import anonymous, password_of
from gpool.cli.command import as_json, client_of, quoted
from gpool.cli.printing import emit_json, table

_ADDRESS = re.compile(r"(?:0x)?([0-9a-fA-F]{40})")


@dataclass(frozen=True, slots=True)
class WalletChoice:
    """Wallet that signs: its key file, or the address of an external one, whose signature is asked for."""

    key_file: Path | None
    address: str | None = None


def signed(
    api: ApiTransport, chosen: WalletChoice, purpose: str = "sign_in", account: str = ""
) -> dict[str, str]:
    """Message for the server that `api` dials, shown and signed. `Invalid` for a malformed address.

    `purpose`: a `WalletPurpose`; `account`: the user name that the statement names.
    """
    try:
        from gpool.wallet.signing import from_bytes
    except ImportError as exc:
        raise Unprocessable("wallets need more packages: pip install 'gpool[wallet]'") from exc

    from gpool.wallet.signin import WalletPurpose

    wanted = WalletPurpose(purpose)
    if chosen.key_file is not None:
        key = key_from(chosen.key_file)
        text = message_for(api, key.address, wanted, account)
        click.echo(f"Signing with {key.address}:\n\n{text}\n", err=True)
        return {"message": text, "signature": str(key.sign(text.encode()))}
    address = chosen.address or ""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None:
        raise Invalid(f"{address[:60]!r} is not a wallet address; write 0x and 40 hex digits")
    text = message_for(api, from_bytes(bytes.fromhex(match[1])), wanted, account)
    click.echo("Sign this message with your wallet (personal_sign), all lines:\n", err=True)
    click.echo(text)
    click.echo("", err=True)
    pasted: str = click.prompt("Signature", err=True)
    return {"message": text, "signature": normalised_signature(pasted)}


def message_for(api: ApiTransport, address: Any, purpose: WalletPurpose, account: str = "") -> str:
    """Message that is valid at the dialled server only (EIP-4361); `Forbidden` if the server names another one.

    Only nonce, times and chain come from the server: a hostile pool that passes on the nonce of another pool, or
    names another site, gets no signature that is valid there.
    """
    from gpool.wallet import signin
    from gpool.wallet.moments import Moment

    challenge = api.send_json("POST", "/v1/auth/wallet/nonce", {"purpose": purpose.value})
    origin = origin_of(api.url)
    domain = origin.partition("://")[2]
    if (challenge["domain"], challenge["uri"]) != (domain, origin):
        raise Forbidden(
            f"nothing was signed: you dialled {origin}, and the server asks for a signature for "
            f"{str(challenge['uri'])[:200]!r} ({str(challenge['domain'])[:200]!r}). If that is your pool's address, "
            "use it as --url or GPOOL_URL; if the pool is known under the address you dialled, its operator sets "
            f"--public-url {origin}; else the server is not what it claims to be"
        )
    return signin.format(
        signin.SignIn(
            domain=domain,
            address=address,
            uri=origin,
            chain_id=challenge["chain_id"],
            nonce=challenge["nonce"],
            statement=signin.statement_of(purpose, account),
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
    document = _proved(ctx, WalletChoice(wallet_key, address), proof_key, "link")
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

    wallet = WalletChoice(wallet_key, address if wallet_key is None else None)
    document = _proved(ctx, wallet, proof_key, "unlink")
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
    ctx: click.Context, chosen: WalletChoice, proof_key: Path | None, purpose: str
) -> dict[str, Any]:
    if (chosen.address is None) == (chosen.key_file is None):
        raise Invalid("name the wallet: give either ADDRESS or --wallet-key FILE")
    account: str = client_of(ctx).api.get_json("/v1/me")["name"]
    api = anonymous(ctx)
    document: dict[str, Any] = dict(signed(api, chosen, purpose, account))
    if proof_key is not None:
        document["proof"] = signed(api, WalletChoice(proof_key), "approve", account)
    else:
        document["password"] = password_of("Password of your account")
    return document
