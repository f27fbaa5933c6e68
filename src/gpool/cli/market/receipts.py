"""`gpool receipt`: fetch receipts, and verify them without server and network."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import as_json, client_of, examples
from gpool.cli.printing import emit_json, fields, table
from gpool.core.errors import Invalid, NotFound

if TYPE_CHECKING:
    from gpool.client.client import Client
    from gpool.wallet.receipt_keys import KeyHistory
    from gpool.wallet.receipts import Receipt

FAILED = 1
file_argument = click.argument("file", type=click.Path(path_type=Path))
keys_option = click.option(
    "--keys",
    "keys_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="History of the pool's receipt keys (default: receipt-keys.json in gpool's folder).",
)


@click.group()
def receipt() -> None:
    """Fetch receipts; verify them offline."""


@receipt.command("fetch", epilog=examples("gpool receipt fetch rc-… -o receipt.json"))
@click.argument("ids", metavar="RECEIPT...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write, or a folder for several (default: RECEIPT.json here).",
)
@click.pass_context
def receipt_fetch(ctx: click.Context, ids: tuple[str, ...], output: Path | None) -> None:
    """Fetch receipts as files that can be verified offline."""
    if len(ids) > 1 and output is not None and not output.is_dir():
        raise Invalid(f"{output} is not a folder; several receipts are written into one")
    client = client_of(ctx)
    for id_ in ids:
        path = output or Path(f"{id_}.json")
        if path.is_dir():
            path = path / f"{id_}.json"
        path.write_bytes(_fetched(client, id_))
        click.echo(f"{path}")


@receipt.command("show", epilog=examples("gpool receipt show rc-…"))
@click.argument("id_", metavar="RECEIPT")
@as_json
@click.pass_context
def receipt_show(ctx: click.Context, id_: str, as_json: bool) -> None:
    """Fetch a receipt, check both signatures and show it."""
    from gpool.wallet.canonical_json import encode
    from gpool.wallet.receipt_keys import parse_history
    from gpool.wallet.receipts import verified

    client = client_of(ctx)
    history = parse_history(encode(client.api.get_json("/v1/receipt-keys")))
    _show(verified(_fetched(client, id_), history), None, as_json)


def _fetched(client: Client, id_: str) -> bytes:
    """Canonical bytes: the server's answer is parsed JSON, which has one canonical spelling."""
    from gpool.wallet.canonical_json import encode

    return encode(client.api.get_json(f"/v1/receipts/{id_}"))


@receipt.command(
    "verify",
    epilog=examples(
        "gpool receipt verify receipt.json --keys receipt-keys.json",
        "gpool receipt verify receipt.json --wallet 0x… --wallet-signature 0x…",
    ),
)
@file_argument
@keys_option
@click.option("--wallet", metavar="ADDRESS", help="Check a wallet's signature (EIP-712) too.")
@click.option("--wallet-signature", metavar="HEX", help="The signature of --wallet.")
@as_json
@click.pass_context
def receipt_verify(
    ctx: click.Context,
    file: Path,
    keys_file: Path | None,
    wallet: str | None,
    wallet_signature: str | None,
    as_json: bool,
) -> None:
    """Check both signatures of a receipt; exit with 1 if it was altered."""
    from gpool.wallet.errors import BadReceipt
    from gpool.wallet.receipts import verified

    if (wallet is None) != (wallet_signature is None):
        raise Invalid("--wallet and --wallet-signature are given together")
    history = _history(keys_file)
    data = read_bytes(file)
    try:
        found = verified(data, history)
        if wallet is not None and wallet_signature is not None:
            _check_wallet(found, wallet, wallet_signature)
    except BadReceipt as error:
        if as_json:
            emit_json({"valid": False, "reason": error.detail})
        else:
            click.echo(f"gpool: {file} is not valid: {error.detail}", err=True)
        ctx.exit(FAILED)
    _show(found, wallet, as_json)


@receipt.command("typed-data", epilog=examples("gpool receipt typed-data receipt.json"))
@file_argument
def receipt_typed_data(file: Path) -> None:
    """Print a receipt as EIP-712 typed data, for a wallet to sign (eth_signTypedData_v4)."""
    from gpool.wallet import receipts
    from gpool.wallet.typed_data import typed_data

    emit_json(typed_data(receipts.parse(read_bytes(file))))


@receipt.command(
    "keys", epilog=examples("gpool receipt keys --keys new-keys.json --previous receipt-keys.json")
)
@keys_option
@click.option(
    "--previous",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Older copy of the history; the newer one must continue it.",
)
@as_json
def receipt_keys(keys_file: Path | None, previous: Path | None, as_json: bool) -> None:
    """Check a history of receipt keys and list its keys."""
    from gpool.wallet.errors import BadReceipt
    from gpool.wallet.receipt_keys import key_id, parse_history

    history = _history(keys_file)
    if previous is not None and not history.extends(parse_history(read_bytes(previous))):
        raise BadReceipt(f"the history does not continue that of {previous}: keys were replaced")
    ends = [*(entry.from_ms for entry in history.keys[1:]), None]
    spans = [
        (key_id(entry.public), entry.from_ms, end)
        for entry, end in zip(history.keys, ends, strict=True)
    ]
    if as_json:
        emit_json([{"id": id_, "from_ms": start, "to_ms": end} for id_, start, end in spans])
        return
    rows = [(id_, _time(start), _time(end)) for id_, start, end in spans]
    table(("key", "valid from", "valid to"), rows, "No keys.")


@receipt.command("fetch-keys", epilog=examples("gpool receipt fetch-keys"))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write (default: receipt-keys.json in gpool's folder).",
)
@click.pass_context
def receipt_fetch_keys(ctx: click.Context, output: Path | None) -> None:
    """Fetch the pool's history of receipt keys; it must continue the file that is there."""
    from gpool.client.config import write_config
    from gpool.wallet.canonical_json import encode
    from gpool.wallet.errors import BadReceipt
    from gpool.wallet.receipt_keys import parse_history

    path = output or _default_keys()
    fetched = parse_history(encode(client_of(ctx).api.get_json("/v1/receipt-keys")))
    if path.exists() and not fetched.extends(parse_history(read_bytes(path))):
        raise BadReceipt(
            f"nothing was written: the pool's history does not continue that of {path}. Keys were replaced, or it is "
            "another pool's: keep that file, and use -o FILE for this pool"
        )
    write_config(path, fetched.to_bytes())
    click.echo(f"{path}: {len(fetched.keys)} receipt key(s) of {fetched.pool}.")


def _default_keys() -> Path:
    from gpool.client.config import home

    return home() / "receipt-keys.json"


def read_bytes(file: Path) -> bytes:
    """`NotFound` or `Invalid` if the file cannot be read."""
    try:
        return file.read_bytes()
    except FileNotFoundError as exc:
        raise NotFound(f"there is no file {file}") from exc
    except OSError as exc:
        raise Invalid(f"{file} cannot be read: {exc.strerror}") from exc


def _history(keys_file: Path | None) -> KeyHistory:
    from gpool.wallet.receipt_keys import parse_history

    path = keys_file or _default_keys()
    if keys_file is None and not path.exists():
        raise NotFound(
            f"no {path}, the history of receipt keys: run gpool receipt fetch-keys, or name it with --keys"
        )
    return parse_history(read_bytes(path))


def _check_wallet(found: Receipt, wallet: str, signature: str) -> None:
    from gpool.wallet import signing
    from gpool.wallet.errors import BadReceipt
    from gpool.wallet.typed_data import is_signed_by

    if not is_signed_by(found, signing.Signature.parse(signature), signing.parse(wallet)):
        raise BadReceipt(f"{wallet} did not sign this receipt")


def _show(found: Receipt, wallet: str | None, as_json: bool) -> None:
    import msgspec

    if as_json:
        emit_json({"valid": True, "receipt": msgspec.to_builtins(found)})
        return
    gpus = ", ".join(f"{gpu.model} ({gpu.slice}, {gpu.gpu})" for gpu in found.work.gpus)
    charge = found.charge
    shown: dict[str, Any] = {
        "pool": found.work.pool,
        "task": f"{found.work.task}, attempt {found.work.attempt}",
        "node": found.work.node,
        "gpus": gpus or "none (CPU slot)",
        "payer": charge.payer,
        "owner": charge.owner,
        "started": _time(charge.started_ms),
        "ended": f"{_time(charge.ended_ms)} ({charge.end_reason})",
        "charged": f"{charge.charged_ms / 1000:.3f} s",
        "price": f"{_credits(charge.price_per_hour)} credits per hour",
        "amount": f"{_credits(charge.amount)} credits, fee {_credits(charge.fee)}",
        "result": found.work.result_sha256,
        "signed by": f"node {found.node_key[:16]}…, pool {found.pool_key}"
        + (f", wallet {wallet}" if wallet else ""),
    }
    click.echo("Valid receipt.")
    fields(shown, list(shown))


def _credits(microcredits: int) -> str:
    return f"{microcredits // 1_000_000}.{microcredits % 1_000_000:06d}"


def _time(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "-"
    try:
        at = datetime.fromtimestamp(milliseconds // 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")
