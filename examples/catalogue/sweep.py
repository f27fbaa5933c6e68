"""Random search over two hyper-parameters of a logistic regression; standard library only.

Trial n has the same parameters in every task, and a task runs the trials n with n modulo shards equal to its shard.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

Point = tuple[tuple[float, float], int]


def points(seed: int, count: int) -> list[Point]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        x, y = draw.gauss(0, 1), draw.gauss(0, 1)
        found.append(((x, y), int(x - 2 * y + draw.gauss(0, 0.5) > 0)))
    return found


def chance(weights: list[float], place: tuple[float, float]) -> float:
    score = weights[0] + weights[1] * place[0] + weights[2] * place[1]
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, score))))


def accuracy(rate: float, decay: float, train: list[Point], test: list[Point]) -> float:
    weights = [0.0, 0.0, 0.0]
    for place, label in train:
        error = chance(weights, place) - label
        for at, value in enumerate((1.0, *place)):
            weights[at] -= rate * (error * value + decay * weights[at])
    return sum((chance(weights, place) > 0.5) == bool(label) for place, label in test) / len(test)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    train, test = points(given.seed, 2000), points(given.seed + 1, 500)
    best: dict[str, float] = {}
    with Path("trials.jsonl").open("w", encoding="utf-8") as out:
        for trial in range(given.shard, given.trials, given.shards):
            draw = random.Random(f"{given.seed}/{trial}")
            rate, decay = 10 ** draw.uniform(-4, 0), 10 ** draw.uniform(-5, -1)
            found = {"trial": trial, "rate": rate, "decay": decay}
            found["accuracy"] = accuracy(rate, decay, train, test)
            out.write(json.dumps(found) + "\n")
            best = max(best, found, key=lambda one: one.get("accuracy", -1.0))
    print(json.dumps({"best": best}))


if __name__ == "__main__":
    main()
