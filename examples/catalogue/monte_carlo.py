"""Price of a European call option by Monte Carlo simulation; standard library only."""

from __future__ import annotations

import argparse
import json
import math
import random

START, INTEREST, YEARS = 100.0, 0.03, 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--strike", type=float, default=100.0)
    parser.add_argument("--volatility", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    drift = (INTEREST - given.volatility**2 / 2) * YEARS
    spread = given.volatility * math.sqrt(YEARS)
    total = squares = 0.0
    for _ in range(given.samples):
        price = START * math.exp(drift + spread * draw.gauss(0, 1))
        paid = math.exp(-INTEREST * YEARS) * max(0.0, price - given.strike)
        total += paid
        squares += paid * paid
    mean = total / given.samples
    error = math.sqrt(max(0.0, squares / given.samples - mean * mean) / given.samples)
    print(json.dumps({"price": mean, "standard_error": error, "samples": given.samples}))


if __name__ == "__main__":
    main()
