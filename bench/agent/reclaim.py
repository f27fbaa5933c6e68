"""How soon an owner has a GPU back: from the wish to nothing of the task being left, through a real server, agent and sandbox.

python -m bench.reclaim [--json FILE] [--rounds 15]

GPUs are simulated, everything else is real. The owner starts a program the policy names ("program"), or asks for the GPU by
`PATCH /v1/resources/…` as `gpool node pause gpu0 --now` does ("pause"); the task ends at the warning ("polite") or ignores it
("stubborn"). After each round the task must wait again: not failed, not counted, not lost.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from tests.tools.processes import Pool, eventually, processes_saying

POLICY = '[[gpu]]\nprograms = ["gpool-bench-game"]\n'
SCRIPTS = {
    "polite": "while :; do sleep 0.1; done",
    "stubborn": "trap '' TERM; while :; do sleep 0.1; done",
}


class Owner:
    """Somebody at the machine."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._game = folder / "gpool-bench-game"
        shutil.copy(shutil.which("sleep") or "/bin/sleep", self._game)
        self._playing: subprocess.Popen[bytes] | None = None

    def _gpu(self) -> str:
        items = self._pool.ask("GET", "/v1/resources").json()["items"]
        return str(next(one["id"] for one in items if one["kind"] == "gpu"))

    def take(self, how: str) -> None:
        if how == "program":
            self._playing = subprocess.Popen([str(self._game), "600"])
        else:
            wanted = {"available": False, "reclaim": True}
            self._pool.ask("PATCH", f"/v1/resources/{self._gpu()}", wanted)

    def give(self) -> None:
        if self._playing is not None:
            self._playing.kill()
            self._playing.wait()
            self._playing = None
        else:
            self._pool.ask("PATCH", f"/v1/resources/{self._gpu()}", {"available": True})


def rounds(pool: Pool, owner: Owner, how: str, kind: str, count: int) -> list[float]:
    mark = f"gpool-bench-{uuid.uuid4().hex}"
    wanted = {
        "command": ["/bin/sh", "-c", f"{SCRIPTS[kind]} # {mark}"],
        "gpu": "H100",
        "name": kind,
    }
    task = pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    took = []
    for _ in range(count):
        pool.until_status(task, "running", within_s=60)
        eventually("the task runs", lambda: bool(processes_saying(mark)), within_s=30)
        began = time.monotonic()
        owner.take(how)
        eventually("the GPU is free", lambda: not processes_saying(mark), within_s=60)
        took.append(time.monotonic() - began)
        pool.until_status(task, "queued", within_s=30)
        story = pool.status(task)
        assert (story["tries"], story["losses"]) == (0, 0), story
        owner.give()
    pool.ask("DELETE", f"/v1/tasks/{task}")
    pool.until_status(task, "cancelled", within_s=60)
    eventually("it is gone", lambda: not processes_saying(mark), within_s=30)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    seen: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="gpool-reclaim-") as name:
        folder = Path(name)
        rules = folder / "policy.toml"
        rules.write_text(POLICY)
        pool = Pool(folder / "pool")
        (folder / "pool").mkdir()
        try:
            pool.start(agents=())
            pool.join("home", "--simulate-gpus", "H100", "--policy", str(rules))
            owner = Owner(pool, folder)
            for how in ("program", "pause"):
                for kind in SCRIPTS:
                    took = sorted(rounds(pool, owner, how, kind, asked.rounds))
                    seen[f"{how}, {kind}"] = {
                        "p50_s": statistics.median(took),
                        "p95_s": took[min(len(took) - 1, round(0.95 * len(took)))],
                        "max_s": took[-1],
                        "rounds": len(took),
                    }
        except BaseException:
            print(pool.story())
            raise
        finally:
            pool.stop()
    for what, told in seen.items():
        print(
            f"{what:22} p50 {told['p50_s']:.2f} s   p95 {told['p95_s']:.2f} s   max {told['max_s']:.2f} s"
        )
    if asked.json:
        asked.json.write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
