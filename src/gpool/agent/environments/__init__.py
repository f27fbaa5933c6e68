"""Environments of tasks on this node."""

from gpool.agent.environments.building import UvBuilder, find_uv
from gpool.agent.environments.environments import Builder, BuildFailed, Environments, Told
from gpool.agent.environments.indexes import Indexes
from gpool.agent.environments.interpreters import Interpreter, Manifest

__all__ = [
    "BuildFailed",
    "Builder",
    "Environments",
    "Indexes",
    "Interpreter",
    "Manifest",
    "Told",
    "UvBuilder",
    "find_uv",
]
