"""Speed of one source tree relative to another: alternating pairs of short measurements, as ratios.

    python -m bench.compare --before DIR --after DIR [--pairs 9] [--only w1,backlog] [--json FILE]

Each measurement is a documented command (`python -m bench.NAME --json FILE`) in a new process with
the tree's own `.venv/bin/python`, so the module layouts of the trees may differ. A pair measures both
trees one after the other; the order within a pair alternates (before-after, after-before, ...). A ratio
is after/before within one pair, inverted where less is better: above 1, `after` is faster. Exit code 1
if a deciding figure has a median ratio below 0.95 or a measurement failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, harmonic_mean, median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

SHARED = Path(__file__).resolve().parents[2] / "shared"
LIMIT = 0.95
"""Smallest accepted median ratio of a deciding figure."""
TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
BACKLOG_TASKS = "40000"
END_TO_END_S = "10"


class MeasurementFailed(Exception):
    """A benchmark command wrote no usable figures; the text has the end of its output."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Directories that the commands read or write besides their tree."""

    shared: Path
    data: Path
    scratch: Path


@dataclass(frozen=True, slots=True)
class Reading:
    """A figure read from a benchmark's JSON. Only deciding readings have to reach the limit."""

    text: str
    read: Callable[[Any], float]
    more_is_better: bool = True
    decides: bool = True

    def ratio(self, before: float, after: float) -> float:
        return after / before if self.more_is_better else before / after


@dataclass(frozen=True, slots=True)
class Measure:
    """A benchmark command and the figures read from the JSON it writes."""

    arguments: Callable[[Inputs], list[str]]
    readings: tuple[Reading, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


# ---- the measures


def _harness(work: str, repetitions: int, *readings: Reading) -> Measure:
    """Workload `work` of the peers' harness with gpool as the only peer.

    The harness repeats a disturbed repetition, at most 2 x `repetitions` in all; a reading is the median.
    """

    def arguments(inputs: Inputs) -> list[str]:
        base, shared = str(inputs.scratch), str(inputs.shared)
        options = ["--base", base, "--shared", shared, "--peers", "", "--rounds", "1"]
        return ["bench.peers", *options, "--work", work.upper()]

    # Both trees of a pair meet the same load, so a repetition does not wait for a quiet machine.
    return Measure(arguments, readings, {"REPS": str(repetitions), "QUIET_WAIT": "0"})


def _harness_median(work: str, name: str) -> Callable[[Any], float]:
    def read(document: Any) -> float:
        rows = document[work]["gpool"]
        errors = [row["error"] for row in rows if "error" in row]
        if errors:
            raise MeasurementFailed(f"{work}: {errors[0]}")
        incomplete = [row for row in rows if row.get("done", row["n"]) != row["n"]]
        if incomplete:
            raise MeasurementFailed(f"{work}: {incomplete[0]['done']} of {incomplete[0]['n']} done")
        return median([float(row[name]) for row in rows])

    return read


def _drained_per_s(document: Any) -> float:
    if document["succeeded"] != document["tasks"]:
        raise MeasurementFailed(f"{document['succeeded']} of {document['tasks']} tasks succeeded")
    return harmonic_mean([float(fifth["tasks_per_s"]) for fifth in document["fifths"]])


def _backlog_cpu_us(document: Any) -> float:
    names = ("server_cpu_us_a_task", "agent_cpu_us_a_task")
    return fmean(sum(fifth[name] for name in names) for fifth in document["fifths"])


def _decisions(inputs: Inputs) -> list[str]:
    nodes = inputs.data / "openb" / "openb_node_list_gpu_node.csv.gz"
    pods = inputs.data / "openb" / "openb_pod_list_default.csv.gz"
    options = ["--nodes", str(nodes), "--pods", str(pods), "--mode", "fill"]
    return ["bench.placement", *options, "--seeds", "1", "--policies", "gpool"]


MEASURES = {
    "w1": _harness(
        "w1",
        3,
        Reading("functions/s", _harness_median("w1", "tasks_per_s")),
        Reading("CPU ms a task", _harness_median("w1", "cpu_ms_per_task"), False, False),
    ),
    "w2": _harness(
        "w2",
        3,
        Reading("round trip p50, ms", _harness_median("w2", "p50_ms"), False),
        Reading("round trip p99, ms", _harness_median("w2", "p99_ms"), False, False),
    ),
    "w3": _harness(
        "w3",
        1,
        Reading("commands/s", _harness_median("w3", "jobs_per_s")),
        Reading("CPU ms a command", _harness_median("w3", "cpu_ms_per_job"), False, False),
    ),
    "backlog": Measure(
        lambda _: ["bench.backlog", "--tasks", BACKLOG_TASKS],
        (
            Reading("submissions/s", lambda document: float(document["submissions_per_s"])),
            Reading("drained/s", _drained_per_s),
            Reading("CPU µs a task", _backlog_cpu_us, False, False),
        ),
    ),
    "end_to_end": Measure(
        lambda _: ["bench.end_to_end", "--seconds", END_TO_END_S, "--phases", "flood:mixed"],
        (
            Reading("leases/s", lambda document: float(document[0]["leases_per_s"])),
            Reading("server CPU µs a lease", lambda d: float(d[0]["server_cpu_us"]), False, False),
        ),
    ),
    "decisions": Measure(
        _decisions,
        (Reading("decisions/s of CPU time", lambda d: float(d[0]["decisions_per_s"])),),
    ),
}


# ---- one measurement


def run_in_tree(tree: Path, name: str, inputs: Inputs) -> dict[str, float]:
    """Run measure `name` once in `tree`. Return a value for each of its readings."""
    measure = MEASURES[name]
    result = inputs.scratch / "result.json"
    result.unlink(missing_ok=True)
    python = tree / ".venv" / "bin" / "python"
    argv = [str(python), "-m", *measure.arguments(inputs), "--json", str(result)]
    output = _run(argv, tree, measure.environment)
    # A benchmark that misses its own promise exits with 1 and has written its figures.
    if not result.exists():
        raise MeasurementFailed(f"{' '.join(argv)} in {tree} wrote no figures:\n{output[-2000:]}")
    document = json.loads(result.read_text())
    try:
        return {reading.text: reading.read(document) for reading in measure.readings}
    except (KeyError, IndexError, TypeError) as exc:
        raise MeasurementFailed(
            f"{name} in {tree}: unexpected figures in its JSON: {exc!r}"
        ) from exc


def _run(argv: Sequence[str], tree: Path, environment: Mapping[str, str]) -> str:
    """Output of the command, stdout and stderr. Its whole process group is ended after `TIMEOUT_S`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = subprocess.Popen(
        argv,
        cwd=tree,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"{' '.join(argv)} in {tree} ran over {TIMEOUT_S:g} s") from None
    finally:
        if process.poll() is None:
            _stop(process)
    return output


def _stop(process: subprocess.Popen[str]) -> None:
    """End the group: first by SIGTERM, on which the harness stops its servers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        return


# ---- the pairs


class Pair(NamedTuple):
    """Values of one reading in both trees, measured one after the other."""

    before: float
    after: float


Results = dict[str, dict[str, list[Pair]]]
"""By measure, then by the text of the reading."""


def summary(reading: Reading, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians, the ratios of the pairs and their spread; `holds` is None for an informative reading."""
    ratios = [reading.ratio(*pair) for pair in pairs]
    cuts = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "before": median(pair.before for pair in pairs),
        "after": median(pair.after for pair in pairs),
        "ratio": round(median(ratios), 4),
        "quartiles": [round(cuts[0], 4), round(cuts[2], 4)],
        "range": [round(min(ratios), 4), round(max(ratios), 4)],
        "holds": median(ratios) >= LIMIT if reading.decides else None,
        "pairs": [pair._asdict() for pair in pairs],
    }


def summaries(results: Results) -> dict[str, dict[str, Any]]:
    return {
        f"{name} {reading.text}": summary(reading, results[name][reading.text])
        for name in results
        for reading in MEASURES[name].readings
        if results[name][reading.text]
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        f"| figure | before | after | median ratio | quartiles | min–max | pairs | ≥ {LIMIT} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = {True: "yes", False: "**no**", None: "(not required)"}
    for name, row in found.items():
        low, high = row["quartiles"]
        least, most = row["range"]
        lines.append(
            f"| {name} | {row['before']:.6g} | {row['after']:.6g} | {row['ratio']:.3f} "
            f"| {low:.3f}–{high:.3f} | {least:.3f}–{most:.3f} | {len(row['pairs'])} "
            f"| {verdicts[row['holds']]} |"
        )
    return "\n".join(lines)


def measure_pair(
    trees: Mapping[str, Path], name: str, number: int, inputs: Inputs
) -> dict[str, dict[str, float]]:
    """Values of both trees by side; odd pairs measure `after` first."""
    order = ("before", "after") if number % 2 == 0 else ("after", "before")
    values = {}
    for side in order:
        began = perf_counter()
        values[side] = run_in_tree(trees[side], name, inputs)
        said = ", ".join(f"{text} {value:.6g}" for text, value in values[side].items())
        took = perf_counter() - began
        print(
            f"pair {number + 1} {name} {side}: {said} ({took:.0f} s)", file=sys.stderr, flush=True
        )
    return values


def compare(
    trees: Mapping[str, Path],
    names: Sequence[str],
    pairs: int,
    inputs: Inputs,
    keep: Callable[[Results, list[str]], None],
) -> tuple[Results, list[str]]:
    """Samples of all pairs, and the errors of failed pairs, whose values are dropped.

    `keep` is called after each pair, so that an interrupted run loses none.
    """
    results: Results = {name: defaultdict(list) for name in names}
    errors: list[str] = []
    for number in range(pairs):
        for name in names:
            try:
                values = measure_pair(trees, name, number, inputs)
            except MeasurementFailed as exc:
                errors.append(f"pair {number + 1}: {exc}")
                print(errors[-1], file=sys.stderr, flush=True)
                continue
            for reading in MEASURES[name].readings:
                both = {side: values[side][reading.text] for side in values}
                results[name][reading.text].append(Pair(**both))
            keep(results, errors)
    return results, errors


# ---- the trees


def commit(tree: Path) -> str:
    argv = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(argv, cwd=tree, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def problems(trees: Mapping[str, Path], names: Sequence[str], inputs: Inputs) -> list[str]:
    """Reasons why the comparison would fail or would not be fair."""
    found = []
    for side, tree in trees.items():
        argv = [str(tree / ".venv" / "bin" / "python"), "-c", "import gpool; print(gpool.__file__)"]
        if not Path(argv[0]).exists():
            found.append(f"--{side}: {tree} has no .venv/bin/python; run `make setup` there")
            continue
        imported = Path((_run(argv, tree, {}).splitlines() or [""])[-1])
        if not (imported.is_absolute() and imported.resolve().is_relative_to(tree)):
            found.append(
                f"--{side}: the .venv of {tree} does not have that tree's gpool installed but another "
                f"tree's gpool or none ({imported}); run `make setup` there"
            )
    if {"w1", "w2", "w3"} & {*names} and not (inputs.shared / "bench.py").exists():
        found.append(f"there is no bench.py in {inputs.shared}; name its directory with --shared")
    if "decisions" in names and not (inputs.data / "openb").is_dir():
        found.append(f"there is no openb in {inputs.data}; name its directory with --data")
    # The benchmark takes its nodes from this trace, or makes them up where the trace is missing.
    traces = [(tree.parent / "shared" / "data" / "openb").is_dir() for tree in trees.values()]
    if "end_to_end" in names and len({*traces}) > 1:
        found.append(
            "end_to_end: only one of the trees has ../shared/data/openb beside it, so their nodes "
            "would differ; put both trees into one directory"
        )
    return found


def main() -> int:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--before", type=Path, required=True, help="tree with its own .venv")
    asked.add_argument("--after", type=Path, required=True, help="tree with its own .venv")
    asked.add_argument("--pairs", type=int, default=9)
    asked.add_argument("--only", default=",".join(MEASURES), help="measures, comma-separated")
    asked.add_argument("--shared", type=Path, default=SHARED / "bench", help="harness of W1 to W3")
    asked.add_argument("--data", type=Path, default=SHARED / "data", help="has the openb trace")
    asked.add_argument("--json", type=Path, help="written after each pair")
    options = asked.parse_args()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    names = options.only.split(",")
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        asked.error(f"unknown measure {unknown[0]!r}; choose from {', '.join(MEASURES)}")
    if options.pairs < 1:
        asked.error(f"--pairs is {options.pairs}; at least 1 is needed")
    commits = {side: commit(tree) for side, tree in trees.items()}

    def keep(results: Results, errors: list[str]) -> None:
        if options.json:
            document = {"commits": commits, "figures": summaries(results), "errors": errors}
            options.json.write_text(json.dumps(document, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="gpool-") as scratch:
        inputs = Inputs(options.shared.resolve(), options.data.resolve(), Path(scratch))
        obstacles = problems(trees, names, inputs)
        if obstacles:
            print("\n".join(obstacles), file=sys.stderr)
            return 2
        results, errors = compare(trees, names, options.pairs, inputs, keep)
    keep(results, errors)
    found = summaries(results)
    print(f"before {commits['before']}, after {commits['after']}, load {os.getloadavg()[0]:.1f}\n")
    print(table(found))
    for error in errors:
        print(f"\nfailed: {error}")
    return 1 if errors or any(row["holds"] is False for row in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
