"""The microVM runtime: each task in a guest with its own kernel."""
