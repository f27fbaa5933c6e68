"""What `gang.sh` runs: two agents on one machine form a gang whose members sum by NCCL over its network."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.tools.processes import SHORT_LEASE, Pool, eventually

HERE = Path(__file__).resolve().parent
PORTS = {"first": "47100", "second": "47400"}
PATIENCE_S = 120
FINAL = ("succeeded", "failed", "cancelled")
OPTIONS = ("run", "-d", "--nodes", "2", "--gpu", "1", "--memory", "8GB", "--engine", "torchrun")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="gpool-gang-"))
    pool = Pool(folder, {**SHORT_LEASE, "GPOOL_SERVER_TTL_S": "4", "GPOOL_SERVER_MARGIN_S": "1"})
    try:
        pool.start(agents=())
        for name, port in PORTS.items():
            within = ("env", f"GPOOL_AGENT_GANG_PORT={port}")
            pool.joining(name, "--site", "lab", "--address", "127.0.0.1", within=within)
        for name in PORTS:
            pool.until_online(name)
        eventually("both lend the card", lambda: cards(pool) >= len(PORTS), PATIENCE_S)
        right = sums(pool)
        if not right:
            print(pool.story())
    except Exception:
        print(pool.story())
        raise
    finally:
        pool.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if right else 1


def cards(pool: Pool) -> int:
    return sum(len(node["gpus"]) for node in pool.ask("GET", "/v1/nodes").json()["items"])


def sums(pool: Pool) -> bool:
    task = submitted(pool, HERE / "gang_sums.py")
    said = ended(pool, task)
    return said.count("all sums right") == len(PORTS)


def submitted(pool: Pool, script: Path) -> str:
    done = pool.gpool(*OPTIONS, str(script))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()


def printed(pool: Pool, task: str) -> str:
    items = pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
    return "".join(item["text"] for item in items)


def ended(pool: Pool, task: str) -> str:
    eventually("it ends", lambda: pool.status(task)["status"] in FINAL, PATIENCE_S, every_s=0.2)
    document, said = pool.status(task), printed(pool, task)
    print(f"-- {document['status']} {document.get('error_text') or ''} epoch {document['epoch']}")
    print(said, flush=True)
    return said


if __name__ == "__main__":
    sys.exit(main())
