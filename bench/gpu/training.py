"""A transformer trained for a fixed number of steps, outside and inside a pool, alternating; the ratio of the best runs.

`training.py loop`: one run here, one JSON line. `training.py [ROUNDS]`: all runs. Two batches: one fills the GPU, one
leaves it waiting for the launches of the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 32_000, 1024, 24, 16, 1024
BATCHES = {"full": (16, 30), "small": (1, 60)}  # sequences, steps
WARM_STEPS = 8
DEVICE = "cuda"
LIMIT_S = 90.0
KINDS: dict[str, tuple[str, ...]] = {
    "default": ("--gpu", "1", "--memory", "32GB"),
    "8 cpus": ("--gpu", "1", "--memory", "32GB", "--cpus", "8"),
}
GROUPS = Path("/sys/fs/cgroup")


def loop() -> None:
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
    told: dict[str, object] = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }
    for name, (many, steps) in BATCHES.items():
        words = torch.randint(VOCABULARY, (many, LENGTH + 1), device=DEVICE)

        def step(words: Any = words) -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                found = model(words[:, :-1])
                loss = nn.functional.cross_entropy(
                    found.flatten(0, 1).float(), words[:, 1:].flatten()
                )
            loss.backward()
            best.step()
            best.zero_grad(set_to_none=True)
            return loss

        for _ in range(WARM_STEPS):
            step()
        torch.cuda.synchronize()
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
        told[name] = {
            "tokens/s": round(many * LENGTH * steps / took),
            "ms": round(1000 * took / steps, 3),
            "worst ms": round(1000 * worst, 3),
            "cpu s / s": round((time.process_time() - cpu) / took, 3),
            "loss": round(float(loss.detach()), 4),
        }
    print(json.dumps(told), flush=True)


def line_of(out: list[str]) -> dict[str, Any]:
    found = [line for line in out if line.startswith("{") and '"parameters"' in line]
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


def main(rounds: int) -> int:
    from pool import Pool, pool, say  # noqa: PLC0415 - not in a task

    runs: dict[str, list[dict[str, Any]]] = {"bare": [], **{kind: [] for kind in KINDS}}
    alone = outside()
    say(step="bare, no agent on the machine", **alone)

    def inside(made: Pool, kind: str) -> dict[str, Any]:
        words = ("run", *KINDS[kind], "--input", "training.py", "--", "python3", "training.py")
        before = throttled_s()
        ran = made.gpool(*words, "loop", timeout=LIMIT_S)
        found = line_of(ran.out)
        say(step=kind, throttled_s=round(throttled_s() - before, 2), **(found or ran.brief()))
        return found

    with pool(18482, "exclusive") as made:
        for _ in range(rounds):
            bare = outside()
            say(step="bare", **bare)
            runs["bare"].append(bare)
            for kind in KINDS:
                runs[kind].append(inside(made, kind))

    def best(kind: str, batch: str) -> float:
        return max((one[batch]["tokens/s"] for one in runs[kind] if one), default=0.0)

    ratios = {
        f"{kind}, {batch} batch": round(best(kind, batch) / max(1.0, best("bare", batch)), 4)
        for kind in KINDS
        for batch in BATCHES
    }
    report = {"verdict": "training", "in gpool / bare": ratios, "wanted": 0.99}
    if alone:
        ratio = {
            batch: round(best("bare", batch) / alone[batch]["tokens/s"], 4) for batch in BATCHES
        }
        report["bare beside an agent / without"] = ratio
    print(json.dumps(report), flush=True)
    if os.environ.get("OUT"):
        text = json.dumps({**report, "alone": alone, "runs": runs}, indent=1)
        Path(os.environ["OUT"], "training.json").write_text(text + "\n")
    return not (ratios and min(ratios.values()) >= 0.99)


if __name__ == "__main__":
    if sys.argv[1:] == ["loop"]:
        loop()
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
