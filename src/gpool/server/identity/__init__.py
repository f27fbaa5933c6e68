"""Authentication and authorization: passwords, tokens, keys, node proofs, sealed secrets, throttling, audit chain."""
