"""Classify the lines of texts.txt with a transformer encoder of random weights; one JSON document per line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

LETTERS, LENGTH = 256, 64


class Classifier(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.encoder(self.letters(codes) + self.places(places)).mean(dim=1))


def codes_of(text: str) -> list[int]:
    return list(text.encode()[:LENGTH].ljust(LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier(given.width).to(device).eval()
    lines = [line for line in Path("texts.txt").read_text("utf-8").splitlines() if line]
    with torch.inference_mode(), Path("labels.jsonl").open("w", encoding="utf-8") as out:
        for at in range(0, len(lines), given.batch_size):
            batch = lines[at : at + given.batch_size]
            codes = torch.tensor([codes_of(line) for line in batch], device=device)
            for line, chances in zip(batch, model(codes).softmax(dim=1).tolist(), strict=True):
                label = max(range(2), key=chances.__getitem__)
                out.write(
                    json.dumps({"text": line, "label": label, "chance": round(chances[label], 4)})
                    + "\n"
                )
    print(f"classified {len(lines)} lines on {device}")


if __name__ == "__main__":
    main()
