"""Prometheus metrics of a server: declared in `catalogue`, counted in `registry`, read from the state in `collectors`."""

from __future__ import annotations

from gpool.server.metrics.registry import Metrics

__all__ = ["Metrics"]
