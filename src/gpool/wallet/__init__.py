"""Wallets: addresses, signatures, sign-in messages, key files, Merkle trees. Pure; imported module by module.

`keccak` and `curve` need the `wallet` extra; `import gpool` loads nothing of it.
"""
