"""We agree with eth-account and its parts on keys, signatures, addresses, key files and calls."""

from __future__ import annotations

import json
import warnings
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.wallet import keystore, signing
from gpool.wallet.crypto import ORDER
from gpool.wallet.errors import BadSignature
from gpool.wallet.signing import Signature, WalletKey

with warnings.catch_warnings():  # theirs, about each other
    warnings.simplefilter("ignore")
    eth_account = import_module("eth_account")
    eth_keyfile = import_module("eth_keyfile")
    eth_abi = import_module("eth_abi")
    eth_utils = import_module("eth_utils")
    from eth_account.messages import encode_defunct

keys = st.integers(1, ORDER - 1).map(lambda number: WalletKey(number.to_bytes(32, "big")))


@given(st.binary(min_size=20, max_size=20))
def test_addresses_are_spelled_as_eth_utils_spells_them(raw: bytes) -> None:
    assert signing.from_bytes(raw) == eth_utils.to_checksum_address(raw)


@given(keys, st.binary(max_size=500))
def test_signatures_are_eth_accounts_own(key: WalletKey, message: bytes) -> None:
    account = eth_account.Account.from_key(key.secret)
    theirs = account.sign_message(encode_defunct(message))
    assert key.address == account.address
    assert key.sign(message).to_bytes() == bytes(theirs.signature)
    assert signing.personal_hash(message) == bytes(theirs.message_hash)


@given(keys, st.binary(max_size=60), st.integers(0, 64), st.integers(0, 7))
def test_whoever_we_recover_eth_account_recovers_too(
    key: WalletKey, message: bytes, at: int, bit: int
) -> None:
    """Over damaged signatures: we refuse more, and never name another signer."""
    raw = bytearray(key.sign(message).to_bytes())
    raw[at] ^= 1 << bit
    try:
        ours = signing.recover(message, Signature.from_bytes(bytes(raw)))
    except BadSignature:
        return
    theirs = eth_account.Account.recover_message(encode_defunct(message), signature=bytes(raw))
    assert ours == theirs != key.address


@pytest.mark.parametrize("kdf", ["scrypt", "pbkdf2"])
@settings(max_examples=8)
@given(key=keys, password=st.text(min_size=1, max_size=20))
def test_key_files_of_eth_keyfile_open(kdf: str, key: WalletKey, password: str) -> None:
    file = eth_keyfile.create_keyfile_json(
        key.secret, password.encode("utf-8", "surrogatepass"), kdf=kdf, iterations=8
    )
    assert keystore.parse(json.dumps(file).encode()).decrypt(password) == key


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_calls_are_encoded_as_eth_abi_encodes_them(digest: bytes, signature: bytes) -> None:
    theirs = eth_abi.encode(["bytes32", "bytes"], [digest, signature])
    assert signing.call_data(digest, signature) == signing.MAGIC + theirs
