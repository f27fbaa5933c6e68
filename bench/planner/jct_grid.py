"""The Philly replay over a grid of windows and pool sizes: gpool beside LAS and MLFQ, and the checks of each cell.

python -m bench.jct_grid --trace FILE --out DIR [--windows NAME …] [--nodes N …] [--policies NAME …] [--again NAME …]

Each cell is one JSON file under --out, written after each policy; a policy that is there is not run again (`--again` runs
it anew). Two of the windows are drawn by SEED. Constants of the planner were chosen on October alone, but not all other
windows were unseen: earlier versions were run on parts of them (docs/decisions/0028).
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date, timedelta
from pathlib import Path
from random import Random

from bench.jct import measure
from bench.philly import OCTOBER, OTHER_WEEKS, read_jobs

SEED = 14
NODES = (40, 56, 72, 90)
POLICIES = ("FIFO", "LAS", "MLFQ", "gpool", "gpool fair share")
_FIRST, _END = date(2017, 9, 25), date(2017, 12, 23)  # of the trace's dense part
_DAYS, _MOST_COMMON = (21, 42), 0.75
Row = dict[str, object]
Cell = dict[str, Row]


def windows() -> dict[str, tuple[str, str]]:
    """First day and the day after the last. A drawn window that shares 3/4 of its days with another is drawn again."""
    draw = Random(SEED)
    found = {
        "october": OCTOBER,
        "november": ("2017-11-06", "2017-12-04"),
        "six-weeks": OTHER_WEEKS,
    }
    while len(found) < 5:
        days = draw.randint(*_DAYS)
        first = _FIRST + timedelta(days=draw.randrange((_END - _FIRST).days - days + 1))
        last = first + timedelta(days=days)
        if all(_common(first, last, other) < _MOST_COMMON * days for other in found.values()):
            found[f"drawn-{len(found) - 2}"] = (first.isoformat(), last.isoformat())
    return found


def _common(first: date, last: date, other: tuple[str, str]) -> int:
    begin, end = (date.fromisoformat(day) for day in other)
    return (min(last, end) - max(first, begin)).days


def failures(window: str, nodes: int, cell: Cell) -> list[str]:
    """Checks of issue 14 that the cell fails, each with its figures; a longest wait or CPU time is compared with the better one."""
    own, references = cell["gpool"], (cell["LAS"], cell["MLFQ"])

    def best(field: str) -> float:
        return min(_number(row, field) for row in references)

    most_stops = max(0.6, 1.2 * _number(cell["MLFQ"], "stops_a_job"))
    limits = {
        "jct_s": 1.02 * best("jct_s"),
        "stops_a_job": most_stops,
        "wait_p99_s": 1.1 * best("wait_p99_s"),
        "wait_max_s": best("wait_max_s"),
        "cpu_s": 20 * _number(cell["MLFQ"], "cpu_s"),
    }
    if (window, nodes) == ("october", 72):
        limits["jct_s"] = min(limits["jct_s"], 0.25 * _number(cell["FIFO"], "jct_s"))
    return [
        f"{field} {_number(own, field):g} > {limit:g}"
        for field, limit in limits.items()
        if _number(own, field) > limit
    ]


def _number(row: Row, field: str) -> float:
    value = row[field]
    assert isinstance(value, int | float)
    return float(value)


def table(cells: dict[tuple[str, int], Cell]) -> str:
    """Ratios to the better of LAS and MLFQ; completion also relative to FIFO."""
    head = (
        "window", "nodes", "jct/FIFO", "jct", "stops (MLFQ)", "p99 wait", "longest wait",
        "cpu/MLFQ", "fair share jct", "fails",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (window, nodes), cell in cells.items():
        if not {"FIFO", "LAS", "MLFQ", "gpool"} <= cell.keys():
            continue
        own = cell["gpool"]

        def ratio(field: str, own: Row = own, cell: Cell = cell) -> str:
            best = min(_number(cell[name], field) for name in ("LAS", "MLFQ"))
            return f"{_number(own, field) / best:.3f}"

        fair = cell.get("gpool fair share")
        cost = "-" if fair is None else f"{_number(fair, 'jct_s') / _number(own, 'jct_s'):.3f}"
        row = (
            window,
            str(nodes),
            f"{_number(own, 'jct_s') / _number(cell['FIFO'], 'jct_s'):.4f}",
            ratio("jct_s"),
            f"{_number(own, 'stops_a_job'):.2f} ({_number(cell['MLFQ'], 'stops_a_job'):.2f})",
            ratio("wait_p99_s"),
            ratio("wait_max_s"),
            f"{_number(own, 'cpu_s') / max(0.1, _number(cell['MLFQ'], 'cpu_s')):.1f}",
            cost,
            "; ".join(failures(window, nodes, cell)) or "none",
        )
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", nargs="*", choices=[*windows()], default=[*windows()])
    parser.add_argument("--nodes", nargs="*", type=int, default=[*NODES])
    parser.add_argument("--policies", nargs="*", default=[*POLICIES])
    parser.add_argument("--again", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cells: dict[tuple[str, int], Cell] = {}
    for window in arguments.windows:
        first, last = windows()[window]
        for nodes in arguments.nodes:
            file = arguments.out / f"{window}-{nodes}.json"
            cell: Cell = json.loads(file.read_text()) if file.exists() else {}
            for policy in arguments.policies:
                if policy in cell and policy not in arguments.again:
                    continue
                jobs = read_jobs(arguments.trace, first, last)
                cell[policy] = measure(policy, jobs, nodes, 0.0)
                print(window, nodes, cell[policy], file=sys.stderr, flush=True)
                file.write_text(json.dumps(cell, indent=1) + "\n")
            cells[window, nodes] = cell
    print(table(cells))
    if any(" none |" not in line for line in table(cells).splitlines()[2:]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
