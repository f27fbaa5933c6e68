"""gpool: pool GPUs."""
