"""Signatures of work as nodes report them: sizes and letters only. Whose they are is verified with the receipt."""

from __future__ import annotations

import msgspec

from gpool.wallet.receipt_keys import MAX_GPUS, ReceiptGpu
from gpool.wire.frames import WorkSignature

SIGNATURE_BYTES = 64


def is_well_formed(work: WorkSignature | None) -> bool:
    """Whether a report's signature can be stored; none at all is well-formed too."""
    if work is None:
        return True
    if len(work.signature) != SIGNATURE_BYTES or len(work.gpus) > MAX_GPUS:
        return False
    named = [{"gpu": each.gpu, "model": each.model, "slice": each.slice} for each in work.gpus]
    try:
        msgspec.convert(named, tuple[ReceiptGpu, ...])
    except msgspec.ValidationError:
        return False
    return all("\0" not in each.model + each.slice for each in work.gpus)
