"""Fine-tune a small network; after each epoch its state goes to state/, and a restarted task goes on from there."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

STATE = Path("state")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.randn(512, 8, device=device)
    targets = inputs.sum(dim=1, keepdim=True).tanh()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=given.lr)
    STATE.mkdir(exist_ok=True)
    first = 0
    if (STATE / "last.pt").exists():
        saved = torch.load(STATE / "last.pt", map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        first = saved["epoch"] + 1
        print(f"resumed after epoch {saved['epoch']}")
    for epoch in range(first, given.epochs):
        for at in range(0, len(inputs), 64):
            loss = nn.functional.mse_loss(model(inputs[at : at + 64]), targets[at : at + 64])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "epoch": epoch}
        torch.save(state, STATE / "next.pt")
        (STATE / "next.pt").replace(STATE / "last.pt")  # a checkpoint never holds half a file
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
