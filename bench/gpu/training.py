"""A transformer trained for a fixed number of steps, outside and inside a pool, alternating; the ratio of the best runs.

`training.py loop`: one run here, one JSON line. `training.py [ROUNDS]`: all runs. Two batches: one fills the GPU, one
leaves it waiting for the launches of the CPU. `halves.py` runs the same loop in two halves of a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 32_000, 1024, 24, 16, 1024
BATCHES = {"full": (16, 30, 1), "small": (1, 30, 8)}  # sequences, steps, repeats
"""The best repeat counts: with a small batch the CPU's speed decides, and it varies by a fifth."""
WARM_STEPS = 8
DEVICE = "cuda"
LIMIT_S = 90.0
LATEST_S = float(os.environ.get("LATEST_S", "290"))
ROUND_S, MORE_S, END_S = 58.0, 28.0, 8.0  # seconds of a pair of runs, of one run, of the pool's end
KINDS: dict[str, tuple[str, ...]] = {
    "default": ("--gpu", "1", "--memory", "32GB"),
    "8 cpus": ("--gpu", "1", "--memory", "32GB", "--cpus", "8"),
}
WANTED = 0.99
GROUPS = Path("/sys/fs/cgroup")


def transformer() -> Callable[[int], Callable[[], Any]]:
    """Build the model on the GPU; return a maker of training steps by number of sequences."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.wide = nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )

        def forward(self, x: Any) -> Any:
            many, length, _ = x.shape
            parts = self.mix(self.first(x)).view(many, length, 3, HEADS, WIDTH // HEADS)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(many, length, WIDTH))
            return x + self.wide(self.second(x))

    with torch.device(DEVICE):
        embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        model = nn.Sequential(embed, *(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), head)
    best = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def training(many: int) -> Callable[[], Any]:
        words = torch.randint(VOCABULARY, (many, LENGTH + 1), device=DEVICE)

        def step() -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                found = model(words[:, :-1])
                loss = nn.functional.cross_entropy(
                    found.flatten(0, 1).float(), words[:, 1:].flatten()
                )
            loss.backward()
            best.step()
            best.zero_grad(set_to_none=True)
            return loss

        return step

    return training


def loop() -> None:
    import torch  # noqa: PLC0415

    training = transformer()
    told: dict[str, object] = {
        "model": "transformer",
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }
    for name, (many, steps, repeats) in BATCHES.items():
        step = training(many)
        for _ in range(WARM_STEPS):
            step()
        torch.cuda.synchronize()
        measured = [timed(step, steps, many * LENGTH) for _ in range(repeats)]
        told[name] = max(measured, key=lambda one: one["tokens/s"])
    print(json.dumps(told), flush=True)


def timed(step: Callable[[], Any], steps: int, tokens: int) -> dict[str, float]:
    """Run `steps` of `tokens` each."""
    import torch  # noqa: PLC0415

    cpu, began, worst = time.process_time(), time.perf_counter(), 0.0
    before = began
    for at in range(steps):
        loss = step()
        if at % 5 == 4:
            torch.cuda.synchronize()
            now = time.perf_counter()
            worst, before = max(worst, (now - before) / 5), now
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    return {
        "tokens/s": round(tokens * steps / took),
        "ms": round(1000 * took / steps, 3),
        "worst ms": round(1000 * worst, 3),
        "cpu s / s": round((time.process_time() - cpu) / took, 3),
        "loss": round(float(loss.detach()), 4),
    }


def line_of(out: list[str]) -> dict[str, Any]:
    found = [line for line in out if line.startswith("{") and '"model"' in line]
    return dict(json.loads(found[-1])) if found else {}


def outside() -> dict[str, Any]:
    words = [sys.executable, __file__, "loop"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
    return line_of(done.stdout.splitlines())


def throttled_s() -> float:
    """Seconds for which the kernel held sandboxes back at their CPU quota, all of them together."""
    total = 0
    for file in GROUPS.rglob("gpool-*/cpu.stat"):
        for line in file.read_text().splitlines():
            if line.startswith("throttled_usec "):
                total += int(line.split()[1])
    return total / 1e6


Runs = dict[str, list[dict[str, Any]]]


def measure(runs: Runs, rounds: int) -> None:
    """Fill `runs`, as many as fit into the time; a bare run waits for the end of the scrub after the task before it."""
    from pool import BEGAN, Pool, pool, say, wait_free  # noqa: PLC0415 - not in a task

    def left_s() -> float:
        return LATEST_S - END_S - (time.perf_counter() - BEGAN)

    def bare(kind: str) -> None:
        found = outside()
        say(step=kind, **found)
        runs[kind].append(found)

    def inside(made: Pool, kind: str) -> None:
        words = ("run", *KINDS[kind], "--input", "training.py", "--", "python3", "training.py")
        before = throttled_s()
        ran = made.gpool(*words, "loop", timeout=LIMIT_S)
        found = line_of(ran.out)
        say(step=kind, throttled_s=round(throttled_s() - before, 2), **(found or ran.brief()))
        runs[kind].append(found)

    wait_free()
    with pool(18482, "exclusive") as made:
        ends = -1
        for _ in range(rounds):
            if left_s() < ROUND_S:
                say(step="late", left_s=round(left_s()))
                break
            if ends >= 0:
                made.wait_for_end(ends)
            bare("bare")
            inside(made, "default")
            ends = made.ends()
        if left_s() > MORE_S:
            inside(made, "8 cpus")
    if left_s() > MORE_S - END_S and wait_free():
        bare("bare, no agent")


def main(rounds: int) -> int:
    runs: Runs = {"bare": [], "bare, no agent": [], **{kind: [] for kind in KINDS}}
    try:
        measure(runs, rounds)
    finally:
        failed = report(runs)
    return failed


def report(runs: Runs) -> bool:
    def best(kind: str, batch: str) -> float:
        return max((one[batch]["tokens/s"] for one in runs[kind] if one), default=0.0)

    ratios = {
        f"{kind}, {batch} batch": round(best(kind, batch) / best("bare", batch), 4)
        for kind in ("default", "8 cpus", "bare, no agent")
        for batch in BATCHES
        if best("bare", batch) and best(kind, batch)
    }
    judged = [ratios.get(f"default, {batch} batch", 0.0) for batch in BATCHES]
    verdict = {
        "verdict": "training",
        "pass": min(judged) >= WANTED,
        "in gpool / bare": ratios,
        "wanted": WANTED,
        "runs": {kind: sum(1 for one in each if one) for kind, each in runs.items()},
    }
    print(json.dumps(verdict), flush=True)
    if os.environ.get("OUT"):
        text = json.dumps({**verdict, "all": runs}, indent=1)
        Path(os.environ["OUT"], "training.json").write_text(text + "\n")
    return not verdict["pass"]


if __name__ == "__main__":
    if sys.argv[1:] == ["loop"]:
        loop()
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
