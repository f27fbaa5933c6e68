"""Sandbox runtimes. `protocol` is their interface, `registry` lists them."""
