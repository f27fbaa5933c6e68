"""The choice of a gang's link: a pure function of what its members' nodes offer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.gangs import GangLink, common_link

D, W = "direct", "wireguard"
offers = st.frozensets(st.sampled_from([D, W, "relay", "of a newer agent"]))


@pytest.mark.parametrize(
    ("offered", "link"),
    [
        ([{D, W}, {D, W}], GangLink.DIRECT),
        ([{D}, {D}], GangLink.DIRECT),
        ([{D, W}, {W}], GangLink.WIREGUARD),  # one owner did not declare the link trusted
        ([{D}, {W}], GangLink.RELAY),
        ([{D, W}, set()], GangLink.RELAY),  # an older or rootless agent
        ([], GangLink.RELAY),
    ],
)
def test_the_best_link_that_all_offer_is_chosen(offered: list[set[str]], link: GangLink) -> None:
    assert common_link(offered) is link


@given(st.lists(offers, min_size=1))
def test_no_member_ever_gets_a_link_that_its_node_does_not_offer(
    offered: list[frozenset[str]],
) -> None:
    link = common_link(offered)
    assert link is GangLink.RELAY or all(link.value in links for links in offered)
    assert common_link(reversed(offered)) is link
