"""Wallets: addresses, signatures, sign-in messages, key files, Merkle trees; receipts and payouts. No I/O except key
files.

`keccak` and `curve` need the `wallet` extra; `import gpool` loads neither.
"""
