"""Sandbox runtimes: ways to isolate a task on this node. `protocol` is their interface, `registry` lists them."""
