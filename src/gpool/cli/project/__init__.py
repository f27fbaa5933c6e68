"""Tasks that a project's `gpool.toml` defines."""
