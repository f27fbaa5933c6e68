"""Encryption at rest with a data key per account: fields of rows, and files in chunks. `account_keys` has the theory."""
