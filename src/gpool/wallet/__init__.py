"""Wallets: addresses, signatures, sign-in messages, key files, Merkle trees. Pure, and imported one module at a time.

`keccak` and `curve` need the `wallet` extra; nothing here is loaded by `import gpool`.
"""
