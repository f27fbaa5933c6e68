"""`import gpool.joblib` makes `joblib.parallel_config(backend="gpool")` run joblib's calls in the pool.

Needs joblib, here and on the nodes: `parallel_config(backend="gpool", pip=["scikit-learn"])`.
"""

from __future__ import annotations

from gpool.client.executors.joblib_backend import JoblibBackend, register

register()

__all__ = ["JoblibBackend"]
