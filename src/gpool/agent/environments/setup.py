"""Wiring of this machine's environments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from gpool.agent.environments.building import (
    LIMITS,
    OpenLane,
    Sandboxes,
    UvBuilder,
    find_uv,
    no_lane,
)
from gpool.agent.environments.egress_targets import IndexLanes, asking, built_in_index
from gpool.agent.environments.environments import Environments
from gpool.agent.environments.indexes import configuration_files, read_indexes
from gpool.agent.environments.interpreters import candidates, find_interpreters, own_interpreter
from gpool.agent.network.sandbox_network import Networks
from gpool.core.model import GIB

log = structlog.get_logger(__name__)

LIMIT_BYTES = 20 * GIB


def environments_for(
    data_dir: Path,
    sandboxes: Sandboxes,
    networks: Networks | None,
    environ: Mapping[str, str],
    *,
    clock: Callable[[], int],
    limit_bytes: int = LIMIT_BYTES,
) -> Environments | None:
    """None without uv or a reachable index. Blocks; `clock` counts microseconds. `sweep` before, `close` after use."""
    uv = find_uv()
    if uv is None:
        log.info("no_environments", why="uv is not installed: pip install uv")
        return None
    home = Path(environ.get("HOME") or "/")
    configured = read_indexes(configuration_files(environ, home, Path(sys.prefix)), environ)
    indexes = configured.reachable(network=networks is not None)
    if indexes is None:
        log.info(
            "no_environments", why="no package index of pip or uv is in reach without a network"
        )
        return None
    open_lane: OpenLane = no_lane
    if networks is not None:
        built_in = built_in_index(uv)
        open_lane = IndexLanes(networks, built_in, asking(indexes)).open
    found = find_interpreters(candidates(environ, home))
    folder = data_dir / "environments"
    limits = replace(
        LIMITS, disk_bytes=2 * limit_bytes
    )  # packages lie on disk twice during a build
    return Environments(
        folder,
        UvBuilder(sandboxes, folder, uv, indexes, open_lane, limits=limits),
        limit_bytes=limit_bytes,
        interpreters=found,
        own=own_interpreter().minor,
        clock=clock,
    )
