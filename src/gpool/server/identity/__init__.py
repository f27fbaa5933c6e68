"""Authentication and authorization: credentials, node proofs, sealed secrets, throttling, audit chain."""
