"""Committed grants on their way to nodes: what each is told, and which must not start. Writes and sends nothing itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from gpool.core.ids import NodeId, SpecId, UserId
from gpool.server.nodes.connection import secrets_shut
from gpool.server.scheduling import gangs
from gpool.server.store.values import GrantedLine
from gpool.wire.frames import Finished, Line


def without(
    lines: Iterable[GrantedLine], shut: set[SpecId]
) -> tuple[list[GrantedLine], list[tuple[NodeId, list[Finished]]]]:
    """The lines without leases whose secrets do not open, and how those end."""
    kept, ended = [], []
    for line in lines:
        bad = [secrets_shut(lease.task, lease.epoch) for id_, lease in line.leases if id_ in shut]
        good = tuple([pair for pair in line.leases if pair[0] not in shut])
        if good:
            kept.append(replace(line, leases=good))
        if bad:
            ended += [(node, bad) for node in gangs.nodes_of(line)]
    return kept, ended


def wire_lines(
    granted: Iterable[GrantedLine], node: NodeId, owner: UserId | None, shared: gangs.Shared
) -> Iterable[Line]:
    """As that node is told of them."""
    for line in granted:
        if line.place.members:
            yield gangs.line_of(line, node, owner, shared)
            continue
        user = line.place.shape.user
        for spec_id, pairs in groupby(line.leases, key=itemgetter(0)):
            yield Line(
                line.place.allocation,
                user,
                user == owner,
                spec_id,
                tuple([lease for _, lease in pairs]),
            )
