"""Key files: the published examples open, wrong passwords and absurd costs do not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.wallet import keystore
from gpool.wallet.errors import BadKeyFile, WrongPassword
from gpool.wallet.keystore import Keystore
from gpool.wallet.signing import WalletKey

# The two examples of the Web3 Secret Storage definition, password "testpassword".
SECRET = "7a28b5ba57c53603b0b07b56bba752f7784bf506fa95edc395f5cf6c7514fe9d"
PBKDF2: dict[str, Any] = {
    "crypto": {
        "cipher": "aes-128-ctr",
        "cipherparams": {"iv": "6087dab2f9fdbbfaddc31a909735c1e6"},
        "ciphertext": "5318b4d5bcd28de64ee5559e671353e16f075ecae9f99c7a79a38af5f869aa46",
        "kdf": "pbkdf2",
        "kdfparams": {
            "c": 262144,
            "dklen": 32,
            "prf": "hmac-sha256",
            "salt": "ae3cd4e7013836a3df6bd7241b12db061dbe2c6785853cce422d148a624ce0bd",
        },
        "mac": "517ead924a9d0dc3124507e3393d175ce3ff7c1e96529c6c555ce9e51205e9b2",
    },
    "id": "3198bc9c-6672-5ab3-d995-4942343ae5b6",
    "version": 3,
}
SCRYPT: dict[str, Any] = {
    "crypto": {
        "cipher": "aes-128-ctr",
        "cipherparams": {"iv": "83dbcc02d8ccb40e466191a123791e0e"},
        "ciphertext": "d172bf743a674da9cdad04534d56926ef8358534d458fffccd4e6ad2fbde479c",
        "kdf": "scrypt",
        "kdfparams": {
            "dklen": 32,
            "n": 262144,
            "p": 8,
            "r": 1,
            "salt": "ab0c7876052600dd703518d6fc3fe8984592145b591fc8fb5c6d43190334ba19",
        },
        "mac": "2103ac29920d71da29f15d75b4a16dbe95cfd7ff8faea1056c33131d846e3097",
    },
    "id": "3198bc9c-6672-5ab3-d995-4942343ae5b6",
    "version": 3,
}


def written(file: dict[str, Any]) -> bytes:
    return json.dumps(file).encode()


def changed(file: dict[str, Any], **values: Any) -> bytes:
    """The file with values of its crypto part, or of its parameters, replaced."""
    crypto = dict(file["crypto"])
    crypto["kdfparams"] = dict(crypto["kdfparams"])
    for name, value in values.items():
        place = crypto["kdfparams"] if name in crypto["kdfparams"] else crypto
        place[name] = value
    return written(file | {"crypto": crypto})


@pytest.mark.parametrize("file", [PBKDF2, SCRYPT])
def test_the_published_examples_open(file: dict[str, Any]) -> None:
    assert keystore.parse(written(file)).decrypt("testpassword") == WalletKey.parse(SECRET)


def test_a_wrong_password_is_said_to_be_one() -> None:
    with pytest.raises(WrongPassword):
        keystore.parse(written(PBKDF2)).decrypt("testpassworD")


def test_a_changed_file_does_not_open_with_the_right_password() -> None:
    for name in ("ciphertext", "mac"):
        other = "00" + PBKDF2["crypto"][name][2:]
        with pytest.raises(WrongPassword):
            keystore.parse(changed(PBKDF2, **{name: other})).decrypt("testpassword")


def test_a_file_that_names_another_address_is_refused() -> None:
    right = WalletKey.parse(SECRET).address
    for spelled in (right, right[2:].lower(), ""):
        opened = keystore.parse(written(PBKDF2 | {"address": spelled})).decrypt("testpassword")
        assert opened.address == right
    other = keystore.parse(written(PBKDF2 | {"address": "00" * 20}))
    with pytest.raises(BadKeyFile, match=right):
        other.decrypt("testpassword")


def test_the_capital_spelling_of_early_files_is_read() -> None:
    old = {"Crypto": PBKDF2["crypto"], "version": 3}
    assert keystore.parse(written(old)).decrypt("testpassword").secret.hex() == SECRET


@pytest.mark.parametrize(
    "cost",
    [
        {"n": 2**30},
        {"n": 2**20, "r": 8},
        {"r": 2**20},
        {"p": 2**20},
        {"n": 2, "r": 1, "p": 2**20},
        {"n": 2, "r": 65},
        {"n": 2**62, "r": 2**62, "p": 2**62},
        {"n": 0},
        {"n": 1},
        {"n": -2},
        {"n": 3},
        {"r": 0},
        {"p": -1},
        {"n": 2.5},
        {"n": "262144"},
        {"n": None},
        {"n": True},
        {"dklen": 16},
        {"dklen": 2**31},
        {"salt": "zz"},
        {"salt": "00" * 1025},
    ],
)
def test_an_absurd_scrypt_cost_is_refused_before_any_work(cost: dict[str, Any]) -> None:
    with pytest.raises(BadKeyFile):
        keystore.parse(changed(SCRYPT, **cost))


@pytest.mark.parametrize("cost", [{"c": 0}, {"c": -1}, {"c": 10**9}, {"prf": "hmac-sha1"}])
def test_an_absurd_pbkdf2_cost_is_refused_before_any_work(cost: dict[str, Any]) -> None:
    with pytest.raises(BadKeyFile):
        keystore.parse(changed(PBKDF2, **cost))


@pytest.mark.parametrize(("n", "r", "p"), [(262144, 8, 1), (4096, 8, 6), (131072, 8, 10)])
def test_what_wallets_use_is_within_the_bounds(n: int, r: int, p: int) -> None:
    assert isinstance(keystore.parse(changed(SCRYPT, n=n, r=r, p=p)), Keystore)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"version": 3}',
        b'{"version": 1, "crypto": {}}',
        b'{"version": 3, "crypto": []}',
        b'{"version": 3, "x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b" " * 70_000,
        changed(PBKDF2, kdf="argon2"),
        changed(PBKDF2, cipher="aes-256-cbc"),
        changed(PBKDF2, cipherparams={}),
        changed(PBKDF2, cipherparams={"iv": "00"}),
        changed(PBKDF2, ciphertext="00" * 31),
        changed(PBKDF2, mac="é" * 64),
        changed(PBKDF2, mac=" 0" * 32),
        changed(SCRYPT, kdf="pbkdf2"),
        written(PBKDF2 | {"address": "0x12"}),
    ],
)
def test_what_is_no_key_file_is_refused(data: bytes) -> None:
    with pytest.raises(BadKeyFile):
        keystore.parse(data)


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: json.dumps(text).encode()))
def test_whatever_the_bytes_reading_never_fails_otherwise(data: bytes) -> None:
    with pytest.raises(BadKeyFile):
        keystore.parse(data)


@pytest.mark.parametrize("text", [SECRET, f"0x{SECRET}\n", f"  {SECRET.upper()}\r\n"])
def test_a_bare_key_is_read_with_a_warning(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    found = keystore.read(path)
    assert found.content == WalletKey.parse(SECRET)
    assert [warning for warning in found.warnings if "not encrypted" in warning]
    assert len(found.warnings) == 1


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1)])
def test_a_key_file_others_can_read_is_warned_about(tmp_path: Path, mode: int, warned: int) -> None:
    path = tmp_path / "keystore.json"
    path.write_bytes(written(PBKDF2))
    path.chmod(mode)
    found = keystore.read(path)
    assert isinstance(found.content, Keystore)
    assert len(found.warnings) == warned
    assert all("chmod 600" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"not a key", SECRET.encode() * 2, b"0" * 64]
)
def test_a_file_without_a_key_is_refused_and_never_repeated(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(BadKeyFile) as caught:
        keystore.read(path)
    assert len(content) < 9 or content[:9].decode() not in caught.value.detail.replace(
        str(path), ""
    )


def test_what_is_not_a_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    large = tmp_path / "large"
    large.write_bytes(b"0" * 70_000)
    for path in (tmp_path, pipe, large, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(BadKeyFile):
            keystore.read(path)


def test_no_secret_shows_in_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET)
    assert SECRET not in repr(keystore.read(path))
    assert PBKDF2["crypto"]["ciphertext"] not in repr(keystore.parse(written(PBKDF2)))
