"""Record and restore of a card's settings. The record is a file, so it survives a killed agent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from gpool.agent.machine.detection.nvml import Nvml, NvmlError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CardSettings:
    """Settings that a task or the agent might change. None: not reported."""

    mig: bool | None
    instances: tuple[str, ...]  # uuids of the owner's MIG instances
    compute_mode: str
    power_limit_mw: int | None
    clocks: tuple[int, int] | None


def record(nvml: Nvml, uuid: str) -> CardSettings:
    card = nvml.card(uuid)
    return CardSettings(
        card.mig,
        tuple(one.uuid for one in nvml.mig_instances(uuid)),
        nvml.compute_mode(uuid),
        card.power_limit_mw,
        nvml.application_clocks(uuid),
    )


def restore(nvml: Nvml, uuid: str, wanted: CardSettings) -> tuple[str, ...]:
    """Return the restored settings; raises `NvmlError` if the card refuses."""
    now, changed = record(nvml, uuid), []
    for instance in nvml.mig_instances(uuid):
        if instance.uuid not in wanted.instances:
            nvml.unmake_mig(uuid, instance.id)
            changed.append("instances")
    if wanted.mig is not None and now.mig != wanted.mig:
        nvml.set_mig(uuid, wanted.mig)
        changed.append("mig")
    if now.compute_mode != wanted.compute_mode:
        nvml.set_compute_mode(uuid, wanted.compute_mode)
        changed.append("compute mode")
    if wanted.clocks is not None and now.clocks != wanted.clocks:
        nvml.set_application_clocks(uuid, wanted.clocks)
        changed.append("clocks")
    if wanted.power_limit_mw is not None and now.power_limit_mw != wanted.power_limit_mw:
        nvml.set_power_limit(uuid, wanted.power_limit_mw)
        changed.append("power limit")
    return tuple(dict.fromkeys(changed))


class Records:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, uuid: str, settings: CardSettings) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        half = self._folder / f"{uuid}.part"
        half.write_bytes(msgspec.json.encode(settings))
        half.rename(self._folder / f"{uuid}.json")

    def drop(self, uuid: str) -> None:
        (self._folder / f"{uuid}.json").unlink(missing_ok=True)

    def left(self) -> Iterator[tuple[str, CardSettings]]:
        for file in sorted(self._folder.glob("*.json")):
            try:
                yield file.stem, msgspec.json.decode(file.read_bytes(), type=CardSettings)
            except msgspec.DecodeError as error:
                log.warning("card_record_unreadable", file=file.name, error=str(error))
                file.unlink()


def recover(nvml: Nvml, records: Records) -> None:
    """A refusal is retried at the next start."""
    for uuid, settings in list(records.left()):
        try:
            changed = restore(nvml, uuid, settings)
        except NvmlError as error:
            log.warning("card_not_restored", gpu=uuid, error=str(error))
        else:
            records.drop(uuid)
            log.info("card_restored", gpu=uuid, changed=changed)
