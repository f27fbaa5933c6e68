"""The example `train.py` on one card for all members: to NCCL, which wants a card once a host, they are several hosts."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

os.environ["NCCL_HOSTID"] = f"node-{os.environ['GPOOL_RANK']}"
sys.argv = ["train.py", "--steps", "60", "--pause", "0.1"]
example = Path(__file__).resolve().parents[2] / "examples" / "gangs" / "train.py"
runpy.run_path(str(example), run_name="__main__")
