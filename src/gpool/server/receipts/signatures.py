"""Signatures of work as nodes report them: sizes and letters only. Whose they are is verified with the receipt."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from gpool.wallet.receipt_keys import MAX_GPUS, MAX_PATH, STEP_BYTES, ReceiptGpu
from gpool.wire.frames import SignedGpu, WorkSignature

SIGNATURE_BYTES = 64


def is_well_formed(work: WorkSignature | None) -> bool:
    """Whether a report's signature can be stored; none at all is well-formed too."""
    if work is None:
        return True
    if len(work.signature) != SIGNATURE_BYTES or (work.path and not _leads_up(work.path)):
        return False
    return not work.gpus or _are_well_formed(work.gpus)


def _leads_up(path: bytes) -> bool:
    steps, rest = divmod(len(path), STEP_BYTES)
    return not rest and steps <= MAX_PATH and max(path[::STEP_BYTES]) <= 1


@lru_cache(maxsize=4096)
def _are_well_formed(gpus: tuple[SignedGpu, ...]) -> bool:
    """Cached: a node reports the same GPUs with each of its leases."""
    if len(gpus) > MAX_GPUS:
        return False
    named = [{"gpu": each.gpu, "model": each.model, "slice": each.slice} for each in gpus]
    try:
        msgspec.convert(named, tuple[ReceiptGpu, ...])
    except msgspec.ValidationError:
        return False
    return all("\0" not in each.model + each.slice for each in gpus)
