"""Runs on a machine with an NVIDIA GPU: see proof.sh. Each step prints a JSON line and goes on after a failure."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from gpool.agent.gpu_verification.cuda import CudaFailed, Device, measure
from gpool.agent.gpu_verification.prover import DeviceProver
from gpool.core.gpu_verification import FILLED, GROUP, Size, keys_of, terms_for
from gpool.server.nodes.gpu_checks import (
    Claimed,
    check_openings,
    digests_of,
    kept,
    rows_of,
    tile_rows,
)
from gpool.server.nodes.gpu_models import packaged_models

RESULTS: dict[str, object] = {}
LACKED = 1 - 80 / 141 / FILLED
clock = time.perf_counter


def step(name: str, action: Callable[[], object]) -> None:
    began = clock()
    try:
        result = action()
    except Exception:  # noqa: BLE001 - a bench that goes on
        result = {"failed": traceback.format_exc()}
    RESULTS[name] = result
    print(json.dumps({name: result, "took_s": round(clock() - began, 3)}), flush=True)


def reference(size: Size, key: tuple[int, int]) -> np.ndarray:
    """X of every tile, in numpy."""
    tiles = []
    for tile in range(size.tiles):
        block, row, column = tile_rows(tile, size.tiles_across)
        a = rows_of(key, 0, block, row, 64, size.length).astype(np.float64)
        b = rows_of(key, 1, block, column, 64, size.length).astype(np.float64)
        tiles.append(kept((a @ b.T).astype(np.int32).reshape(-1)))
    return np.stack(tiles)


def root_of(digests: np.ndarray, size: Size) -> bytes:
    padded = np.zeros(size.leaves * GROUP, np.uint64)
    padded[: len(digests)] = digests
    level = [
        hashlib.sha256(padded[i : i + GROUP].tobytes()).digest()
        for i in range(0, len(padded), GROUP)
    ]
    while len(level) > 1:
        level = [hashlib.sha256(level[i] + level[i + 1]).digest() for i in range(0, len(level), 2)]
    return level[0]


def correct(ptx: bytes | None) -> object:
    size, keys = Size(3, 256, 1088), keys_of(b"s" * 32, 7, "GPU-x", 1)
    expected = reference(size, keys.stream)
    with Device(ptx=ptx) as device:
        if ptx is not None and b".target sm_75" in ptx:
            device.capability = (7, 5)
        prover = DeviceProver(device, size, keys)
        root = prover.commit()
        got = np.frombuffer(device.read(prover._kept, size.result_bytes), np.uint64).reshape(
            size.tiles, -1
        )
        filled = np.frombuffer(device.read(prover._a, 256 * 1088), np.int8).reshape(256, 1088)
        rows = rows_of(keys.stream, 0, 2, 0, 256, 1088)
        digests = np.frombuffer(device.read(prover._digests, size.tiles * 8), np.uint64)
        nonce = b"n" * 32
        prover.answer(nonce, root, 2)
        opening = prover.open([5])[0]
        block, row, column = tile_rows(5, size.tiles_across)
        a = rows_of(keys.stream, 0, block, row, 64, size.length).astype(np.int64)
        b = rows_of(keys.stream, 1, block, column, 64, size.length).astype(np.int64)
        return {
            "stream": bool((filled == rows).all()),
            "wrong_words_of_x": int((got != expected).sum()),
            "digests": bool((digests == digests_of(expected, keys.digest, 0)).all()),
            "root": root == root_of(digests_of(expected, keys.digest, 0), size),
            "exact_tile": opening.product == (a @ b.T).astype("<i4").tobytes(),
            "device": device.name, "uuid": device.uuid, "capability": device.capability,
        }  # fmt: skip


def speeds(ptx: bytes | None) -> object:
    size, keys = Size(8, 8192, 19968), keys_of(b"s" * 32, 7, "GPU-x", 1)
    with Device(ptx=ptx) as device:
        if ptx is not None and b".target sm_75" in ptx:
            device.capability = (7, 5)
        prover = DeviceProver(device, size, keys)
        prover._multiply(0)
        device.finish()
        with device.timed() as whole:
            for block in range(4):
                prover._multiply(block)
        with device.timed() as filling:
            for _ in range(4):
                prover._fill(prover._a, 0, 0, 0, size.side)
                prover._fill(prover._b, 1, 0, 0, size.side)
        with device.timed() as digesting:
            prover._root(keys.digest)
        work = size.operations / size.blocks * 4
        return {
            "teraops_with_stream": work / whole[0] / 1e12,
            "teraops": work / (whole[0] - filling[0]) / 1e12,
            "stream_gbs": 4 * 2 * size.side * size.length / filling[0] / 1e9,
            "root_gbs": size.result_bytes / digesting[0] / 1e9,
        }


def honest(held: list[object]) -> object:
    with Device() as device:
        free, total = device.free_and_total
        terms = terms_for(total, packaged_models()["H200"])
        size, keys = terms.size, keys_of(secrets.token_bytes(32), 7, device.uuid, 1)
        began = clock()
        prover = DeviceProver(device, size, keys)
        taken = clock()
        root = prover.commit()
        committed = clock()
        left, _ = device.free_and_total
        times = []
        for _ in range(5):
            nonce = secrets.token_bytes(32)
            at = clock()
            answer = prover.answer(nonce, root, terms.rounds)
            times.append(clock() - at)
        at = clock()
        chosen = np.random.default_rng().choice(size.tiles, terms.opened, replace=False).tolist()
        openings = prover.open(chosen)
        opened = clock() - at
        held += [Claimed(size, keys, nonce, root, answer), chosen, openings]
        nonce = secrets.token_bytes(32)
        at = clock()
        for block in range(round(size.blocks * LACKED)):  # an 80 GB card that claims to be this one
            prover._multiply(block)
        prover.answer(nonce, root, terms.rounds)
        lacking = clock() - at
        theirs = keys_of(secrets.token_bytes(32), 8, device.uuid, 2)
        prover._keys = (
            theirs  # the same memory serves a second identity, after the first has committed
        )
        other = prover.commit()
        prover._keys = keys
        answer = prover.answer(nonce, root, terms.rounds)
        claimed = Claimed(size, keys, nonce, root, answer)
        first = check_openings(claimed, chosen[:4], prover.open(chosen[:4]), b"d")
        prover._keys = theirs
        answer = prover.answer(nonce, other, terms.rounds)
        claimed = Claimed(size, theirs, nonce, other, answer)
        last = check_openings(claimed, chosen[:4], prover.open(chosen[:4]), b"d")
        cheats = {
            "less_memory": {"lacked": LACKED, "answer_s": lacking},
            "two_identities": {"first": str(first), "last": str(last)},
        }
        second: object = "allocated"
        try:
            DeviceProver(device, size, keys)
        except CudaFailed as error:
            second = str(error)
        return {
            "size": [size.blocks, size.side, size.length], "operations": size.operations,
            "memory_filled": size.result_bytes / total, "free_before": free, "free_left": left, "total": total,
            "take_s": taken - began, "commit_s": committed - taken, "commit_within_s": terms.commit_within / 1e6,
            "teraops": size.operations / (committed - taken) / 1e12,
            "rounds": terms.rounds,
            "answer_s": times, "answer_within_s": terms.answer_within / 1e6, "open_s": opened,
            "second_identity": second,
            "cheats": cheats,
        }  # fmt: skip


def check(held: list[object]) -> object:
    claimed, chosen, openings = held
    began, used = clock(), time.process_time()
    verdict = check_openings(claimed, chosen, openings, secrets.token_bytes(16))
    return {
        "verdict": str(verdict),
        "seconds": clock() - began,
        "cpu_seconds": time.process_time() - used,
    }


def benchmark() -> object:
    with Device() as device:
        began = clock()
        return {**asdict(measure(device)), "seconds": clock() - began}


def torch_rates() -> object:
    """What others get out of this machine: the fastest cheat's tools, and the CPU's."""
    import torch  # noqa: PLC0415 - only here

    def rate(make: Callable[[], object], work: float, cuda: bool, times: int = 5) -> float:
        make()
        if cuda:
            torch.cuda.synchronize()
        began = clock()
        for _ in range(times):
            make()
        if cuda:
            torch.cuda.synchronize()
        return work * times / (clock() - began) / 1e12

    n, k = 8192, 19968
    out: dict[str, object] = {}
    a = torch.randint(-128, 127, (n, k), dtype=torch.int8, device="cuda")
    b = torch.randint(-128, 127, (n, k), dtype=torch.int8, device="cuda")
    out["cuda_int8"] = rate(partial(torch._int_mm, a, b.t()), 2 * n * n * k, True)
    ah, bh = a.bfloat16(), b.bfloat16()
    out["cuda_bf16"] = rate(partial(torch.matmul, ah, bh.t()), 2 * n * n * k, True)
    fa, fb = torch.rand(n, n, device="cuda"), torch.rand(n, n, device="cuda")
    out["cuda_fp32"] = rate(partial(torch.matmul, fa, fb), 2 * n**3, True, 3)
    torch.backends.cuda.matmul.allow_tf32 = True
    out["cuda_tf32"] = rate(partial(torch.matmul, fa, fb), 2 * n**3, True)
    del a, b, ah, bh, fa, fb
    torch.cuda.empty_cache()
    n = 2048
    ca = torch.randint(-128, 127, (n, 8192), dtype=torch.int8)
    cb = torch.randint(-128, 127, (8192, n), dtype=torch.int8)
    for name, make in {
        "cpu_int8": lambda: torch._int_mm(ca, cb),
        "cpu_bf16": partial(torch.matmul, ca.bfloat16(), cb.bfloat16()),
        "cpu_fp32": partial(torch.matmul, ca.float(), cb.float()),
    }.items():
        try:
            out[name] = rate(make, 2 * n * n * 8192, False, 3)
        except Exception as error:  # noqa: BLE001 - a bench that goes on
            out[name] = str(error)
    out["cpu_threads"] = torch.get_num_threads()
    much = torch.ones(1 << 30, dtype=torch.int64)
    out["host_read_gbs"] = rate(much.sum, much.numel() * 8, False, 3) * 1000
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ptx", type=Path)
    asked = parser.parse_args()
    here = Path("src/gpool/agent/gpu")
    step("correct_80", lambda: correct((here / "kernels_80.ptx").read_bytes()))
    step("correct_75", lambda: correct((here / "kernels_75.ptx").read_bytes()))
    step("speeds_80", lambda: speeds((here / "kernels_80.ptx").read_bytes()))
    step("speeds_75", lambda: speeds((here / "kernels_75.ptx").read_bytes()))
    if asked.ptx and asked.ptx.exists():
        step("speeds_fresh", lambda: speeds(asked.ptx.read_bytes()))
    held: list[object] = []
    step("honest", lambda: honest(held))
    if held:
        step("check", lambda: check(held))
    step("benchmark", benchmark)
    step("torch", torch_rates)
    if asked.out:
        asked.out.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
