"""Creation and removal of MIG instances. Blocks as long as the driver does; call it in a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpool.agent.machine.detection.nvml import MigInstance, Nvml, NvmlError
from gpool.agent.sharing.plan import Tenancy


@dataclass(frozen=True, slots=True)
class Instance:
    made: MigInstance
    nodes: tuple[str, ...]  # /dev/nvidia-caps


NodesOf = Callable[[int, int, int], tuple[str, ...]]
"""Device nodes of (card's minor, GPU instance, compute instance)."""


def make(nvml: Nvml, wanted: Tenancy, nodes_of: NodesOf) -> Instance:
    """Enables MIG if needed. Raises `NvmlError` if it does not fit or the profile is unknown."""
    card = nvml.card(wanted.gpu)
    if not card.mig:
        nvml.set_mig(wanted.gpu, True)
    profile = next(
        (one for one in nvml.mig_profiles(wanted.gpu) if one.name == wanted.profile), None
    )
    if profile is None:
        raise NvmlError(f"the GPU has no MIG profile {wanted.profile!r}")
    made = nvml.make_mig(wanted.gpu, profile.id, wanted.start)
    minor = card.minor if card.minor is not None else card.index
    try:
        return Instance(made, nodes_of(minor, made.id, made.compute))
    except OSError as error:
        nvml.unmake_mig(wanted.gpu, made.id)
        raise NvmlError(f"no device nodes for the MIG instance: {error}") from error
