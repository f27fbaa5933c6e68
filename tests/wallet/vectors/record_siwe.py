"""Records what siwe answers to sound and damaged messages: `python record_siwe.py` beside an installed siwe (with abnf < 2.9).

Writes `siwe.json` next to itself. Not a test; it needs nothing of gpool.
"""

from __future__ import annotations

import json
import random
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import siwe
from eth_account import Account
from eth_account.messages import encode_defunct

LETTERS = '\n\n -aFz09:/\t\r\x00é%@[]#?.+"\\_~<'
SWAPS = [
    ("h.example wants", "[::1]:8443 wants", "domain"),
    ("h.example wants", "[v1.x:y] wants", "domain"),
    ("h.example wants", "u:p@h:1 wants", "domain"),
    ("h.example wants", "h.example/x wants", "domain"),
    ("h.example wants", "https://h.example wants", "domain"),
    ("h.example wants", "https://a://h.example wants", "domain"),
    ("h.example wants", ":80 wants", "empty host"),
    ("h.example wants", "a@ wants", "empty host"),
    ("Chain ID: 1", "Chain ID: 01", "leading zeros"),
    ("Chain ID: 1", "Chain ID: x", "chain"),
    ("Version: 1", "Version: 2", "version"),
    ("Version: 1", "Version: 10", "version"),
    ("00Z", "00z", "small letters in a time"),
    ("T0", " 0", "time"),
    ("00Z", "00+01:00", "time"),
    ("00Z", "00+0100", "time"),
    ("00Z", "00.123456Z", "time"),
    ("2026-01", "2026-13", "time"),
    ("ID: id", "ID: ", "request id"),
    ("ID: id", "ID: a b", "request id"),
    ("ipfs://x", "file:///x", "resource"),
    ("ipfs://x", "mailto:x@y", "resource"),
    ("ipfs://x", "http://[::1]:80/%zz", "resource"),
    ("ipfs://x", "http://[1:2:3:4:5:6:7::]/", "resource"),
    ("ipfs://x", "no uri", "resource"),
    ("ipfs://x", "http://1.2.3.4.5/", "numbers and dots that are no IPv4 address"),
    ("\n- ipfs://x", "", "resource"),
]


def message(dice: random.Random, account: str) -> str:
    lines = ["h.example wants you to sign in with your Ethereum account:", account, ""]
    lines += ["Terms: https://h.example/t (v2)"] * dice.getrandbits(1)
    lines += ["", "URI: https://h.example/x", "Version: 1", "Chain ID: 1"]
    lines += [f"Nonce: {dice.getrandbits(40):010x}", "Issued At: 2026-01-02T03:04:00Z"]
    lines += ["Expiration Time: 2036-01-02T03:04:00.500Z"] * dice.getrandbits(1)
    lines += ["Not Before: 2026-01-02T03:04:00Z"] * dice.getrandbits(1)
    return "\n".join([*lines, "Request ID: id", "Resources:", "- ipfs://x"])


def damaged(dice: random.Random, text: str) -> str:
    at = dice.randrange(len(text))
    new = "".join(dice.choice(LETTERS) for _ in range(dice.randrange(3)))
    text = text[:at] + new + text[at + dice.randrange(3) :]
    lines = text.split("\n")
    if dice.getrandbits(2) == 0:
        lines.insert(dice.randrange(len(lines)), lines.pop(dice.randrange(len(lines))))
    return "\n".join(lines)


def read(text: str) -> siwe.SiweMessage | None:
    try:
        return siwe.SiweMessage.from_message(text)
    except ValueError:
        return None


def verified(text: str, signature: str) -> bool:
    try:
        siwe.SiweMessage.from_message(text).verify(
            signature, timestamp=datetime(2030, 1, 1, tzinfo=UTC)
        )
    except siwe.VerificationError:
        return False
    return True


def main() -> None:
    dice = random.Random(4361)
    cases: list[dict[str, object]] = []
    for number in range(60):
        account = Account.from_key(dice.randbytes(32))
        text = message(dice, account.address)
        signed = "0x" + account.sign_message(
            encode_defunct(text=text)
        ).signature.hex().removeprefix("0x")
        if number % 3 == 0:  # another text under the same signature
            text = re.sub(r"Nonce: .", "Nonce: Z", text)
        cases.append(
            {"kind": "signed", "text": text, "taken": read(text) is not None, "signature": signed}
            | {"verified": verified(text, signed)}
        )
        text = damaged(dice, message(dice, account.address))
        cases.append({"kind": "damaged", "text": text, "taken": read(text) is not None})
        text = damaged(dice, message(dice, account.address))
        cases.append({"kind": "damaged", "text": text, "taken": read(text) is not None})
    for old, new, kind in SWAPS:
        text = message(dice, Account.from_key(dice.randbytes(32)).address).replace(old, new, 1)
        cases.append({"kind": kind, "text": text, "taken": read(text) is not None})
    made_by = f"siwe {version('siwe')} with abnf {version('abnf')}"
    where = Path(__file__).with_name("siwe.json")
    where.write_text(json.dumps({"made_by": made_by, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
