"""What checking one proof of GPU costs the server, by the terms of several models: processor seconds on one core, and bytes sent.

python -m bench.gpu_proof [MODEL ...]
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from random import SystemRandom

from gpool.core.gpu_verification import Path, keys_of, leads_to, terms_for
from gpool.core.model import GIB
from gpool.server.nodes.gpu_checks import SomeRows, digest_of, is_product, kept, probe_from
from gpool.server.nodes.gpu_models import packaged_models
from tests.tools.gpu_prover import product_of

GIGABYTES = {"H200": 141, "H100": 80, "A100": 80, "RTX4090": 24, "L4": 24, "T4": 16}


def cost(model: str) -> dict[str, float | int | str]:
    """One tile's check, times as many as are opened; its paths lead nowhere, and are walked all the same."""
    terms = terms_for(GIGABYTES[model] * GIB, packaged_models()[model])
    size, keys = terms.size, keys_of(secrets.token_bytes(32), 1, "GPU-a", 1)
    path = Path(bytes(64), (bytes(32),) * size.depth)
    tiles = SystemRandom().sample(range(size.tiles), 24)
    products = [product_of(size, keys.stream, tile) for tile in tiles]
    rows = SomeRows(size.length)
    began = time.process_time()
    for place, (tile, product) in enumerate(zip(tiles, products, strict=True)):
        words = kept(product.reshape(-1))
        for _ in range(terms.rounds + 1):
            leads_to(bytes(32), tile, digest_of(words, keys.digest, tile), path, size.depth)
        assert is_product(product, size, keys.stream, tile, probe_from(b"d", place), rows)
    spent = (time.process_time() - began) / len(tiles) * terms.opened
    sent = terms.opened * (64 * 64 * 4 + (terms.rounds + 1) * (64 + 32 * size.depth))
    return {
        "model": model,
        "cpu_seconds": round(spent, 3),
        "sent_bytes": sent,
        "commit_within_s": round(terms.commit_within / 1e6, 1),
        "rounds": terms.rounds,
        "length": size.length,
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or GIGABYTES:
        print(json.dumps(cost(name)))
