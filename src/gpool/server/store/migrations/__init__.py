"""Schema migrations: forward only, in process, for both databases."""
