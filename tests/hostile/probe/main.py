"""Tries every attack there is, one after the other, and prints what became of each as one JSON line.

main.py FILE       what was planted, as the agent wrote it: JSON, `{}` when nothing was
"""

from __future__ import annotations

import json
import os
import sys

import on_files  # noqa: F401 - each adds its attacks to the table
import on_kernel  # noqa: F401
import on_network  # noqa: F401
from trying import ATTACKS, PLANTED, attempt


def work(planted: dict[str, object]) -> None:
    PLANTED.update(planted)
    only = planted.get("only")
    for name, attack in ATTACKS.items():
        if isinstance(only, list) and name not in only:
            continue
        told = {"name": name, "became": attempt(attack.act)}
        os.write(1, json.dumps(told).encode() + b"\n")
    os.write(1, json.dumps({"kernel": os.uname().version}).encode() + b"\n")


if __name__ == "__main__":
    with open(sys.argv[1]) as told:
        known = json.loads(told.read())
    work(known)  # with the file closed: it holds what an attack looks for
