"""How a task is isolated on this node. `protocol` is the door; one module a runtime behind it."""
