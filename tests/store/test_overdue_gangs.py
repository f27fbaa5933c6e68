"""Nodes that hold on to gangs that are over, as the store tells them."""

from __future__ import annotations

import pytest

from gpool.core.ids import NodeId
from gpool.core.model import EndReason, OnLoss
from gpool.server.store.operations.leases import gang_members
from gpool.server.store.operations.tasks import tasks
from gpool.wire.frames import Finished, Released
from tests.store.gang_pool import Site, gang_spec, site_of
from tests.store.store_pool import Pool


@pytest.fixture
def site(pool: Pool) -> Site:
    return site_of(pool)


def overdue(site: Site) -> tuple[NodeId, ...]:
    return site.pool.read(gang_members.overdue(site.pool.now()))


def test_a_cancelled_gang_is_to_be_let_go_of_by_all(site: Site) -> None:
    task = site.running()
    assert overdue(site) == ()
    at = site.pool.now()
    site.pool.write(tasks.cancel([task], None, at))
    assert site.pool.read(gang_members.overdue(at)) == ()
    assert set(overdue(site)) == set(site.nodes[:2])
    site.say(0, Released(task, 1))
    assert overdue(site) == (site.nodes[1],)
    site.say(1, Released(task, 1))
    assert overdue(site) == ()


def test_so_is_one_that_failed_and_none_that_goes_on_or_goes_back(site: Site) -> None:
    failed = site.running(gang_spec(3, on_loss=OnLoss.END))
    site.ends(2, failed, 0)
    assert overdue(site) == ()
    before = site.pool.now()
    site.ends(1, failed, 1)
    assert site.pool.read(gang_members.overdue(before)) == ()
    assert overdue(site) == (site.nodes[0],)
    site.say(0, Released(failed, 1))
    back = site.running(gang_spec(2))
    site.say(1, Finished(back, 1, EndReason.PREEMPTED))
    assert overdue(site) == ()
