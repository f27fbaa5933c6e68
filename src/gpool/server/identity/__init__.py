"""Who somebody is, and how it is proved: passwords, tokens, keys, proofs, and the record of their use."""
