"""Which nodes could run a gang's member by the runtimes they have."""

from __future__ import annotations

from dataclasses import replace

from gpool.core.model import Network, RuntimeOffer, Tier
from gpool.core.scheduler.place.fit import Unfit, unfit
from tests.core.scheduler.state.builders import a_node, a_shape

BUBBLEWRAP = RuntimeOffer("bubblewrap", Tier.CONTAINER, frozenset(Network))
DOCKER = RuntimeOffer("docker", Tier.CONTAINER, images=True)
PODMAN = RuntimeOffer("podman", Tier.CONTAINER, frozenset(Network), images=True)


def test_a_member_only_goes_where_its_runtime_can_enter_a_lane() -> None:
    node = a_node()
    offer = replace(node.offer, builds=frozenset({"image"}))
    image = "image:" + "0" * 64
    for runtimes, plain, with_image in (
        ((BUBBLEWRAP, DOCKER), None, Unfit.RUNTIME),
        ((BUBBLEWRAP, PODMAN), None, None),
        ((replace(BUBBLEWRAP, networks=frozenset({Network.NONE})),), Unfit.RUNTIME, Unfit.RUNTIME),
    ):
        given = replace(node, offer=replace(offer, runtimes=runtimes))
        assert unfit(given, a_shape(nodes=2)) is plain
        assert unfit(given, a_shape(nodes=2, environment=image)) is with_image
        # one node needs no lane
        assert unfit(given, a_shape()) is None
