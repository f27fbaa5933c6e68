"""The hostile suite's runs and how they are judged: one stage a host, one column a runtime, one row an attack."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile import guest_control
from tests.hostile.probe import litter
from tests.tools.components import missing

sys.path[:0] = [str(Path(__file__).with_name("probe"))]  # as inside: they know one another by name

import on_files  # noqa: E402, F401 - each adds its attacks to the table
import on_kernel  # noqa: E402, F401
import on_network  # noqa: E402, F401
from trying import ATTACKS  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WITHIN_S = 850.0
PARTS = ("probe", "crawl", "outputs")
OWN_KERNEL = frozenset({"gvisor", "microvm"})
UNPROVED = {
    "write uevent_helper": "no kernel here is built with it",
    "open the ports": "no kernel here is built with it",
    "x32 call": "no kernel here is built with it",
}
"""Refused everywhere, but no control could show what that is worth."""


@dataclass(frozen=True, slots=True)
class Column:
    """One runtime under one kind of agent."""

    kind: str
    root: bool
    needs: str

    @property
    def name(self) -> str:
        return self.kind if self.root else f"{self.kind}, not root"


COLUMNS = {
    column.name: column
    for column in (
        Column("bubblewrap", True, "bubblewrap"),
        Column("bubblewrap", False, "bubblewrap"),
        Column("docker", True, "docker"),
        Column("podman", True, "podman"),
        Column("gvisor", True, "gvisor"),
        Column("microvm", True, "qemu"),
    )
}
CONTROL = "bubblewrap"
CONTROLS = ("bubblewrap", "bubblewrap, not root")
"""Where the same programs run outside too."""


def why_not(column: Column) -> str | None:
    """Which component of a column's is missing here."""
    wanted = ("root", "network namespaces", column.needs)
    return next((name for name in wanted if missing(name) is not None), None)


@functools.cache
def stage(name: str) -> Any:
    """What the stage of a column said; run once a process."""
    column = COLUMNS[name]
    order = {
        "kinds": [column.kind],
        "parts": PARTS,
        "control": name in CONTROLS,
        "root": column.root,
    }
    script = [sys.executable, str(HERE / "stage.py"), json.dumps(order)]
    ran = subprocess.run(
        ["unshare", "--net", "--mount", "--ipc", *script],
        env={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        },
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    if ran.returncode:
        raise AssertionError(f"the stage failed: {ran.stderr[-4000:].decode('utf-8', 'replace')}")
    return json.loads(ran.stdout)


def of(name: str) -> Any:
    return stage(name)["kinds"][COLUMNS[name].kind]


def verdict(name: str, attack: str, became: str) -> str:
    """ "refused", "own kernel" (it met a kernel that is the sandbox's own), or what must not be."""
    if became.startswith("refused"):
        return "refused"
    whole = stage(name)
    other = of(name)["probe"]["kernel"] != whole["kernel"]
    if (
        became == "reached"
        and ATTACKS[attack].of_kernel
        and other
        and COLUMNS[name].kind in OWN_KERNEL
    ):
        return "own kernel"
    return "ESCAPED" if became == "reached" else became


def verdicts(name: str) -> dict[str, str]:
    return {
        attack: verdict(name, attack, became)
        for attack, became in of(name)["probe"]["became"].items()
    }


@functools.cache
def controls() -> dict[str, str]:
    """Where each attack succeeded without the defence: "host", "guest" or why it did not."""
    outside = of(CONTROL)["control"]["probe"]["became"]
    left = [
        name for name, became in outside.items() if became != "reached" and ATTACKS[name].of_kernel
    ]
    inside = guest_control.run(left) if missing("qemu") is None else {}
    return {
        name: "host"
        if became == "reached"
        else "guest"
        if inside.get(name) == "reached"
        else became
        for name, became in outside.items()
    }


def found(name: str) -> list[str]:
    """Where the planted secrets lay that the crawler met inside."""
    words = stage(name)["words"]
    return [where for where, word in words.items() if word in of(name)["crawl"]]


def missed(name: str) -> list[str]:
    """Where the planted secrets lay that the same crawler did not meet outside."""
    words = stage(name)["words"]
    return [where for where, word in words.items() if word not in of(name)["control"]["crawl"]]


def wrong_outputs(name: str) -> list[str]:
    """What a collector must not have done, one line each."""
    said = of(name)
    told = []
    for one in (*said["left"]["took"], *said["deep"]["took"]):
        case = litter.LEFT.get(one["name"])
        wanted = case.becomes if case is not None else litter.REFUSED
        empty = one["became"] == "taken" and one["text"] == "0 files"  # it was never there outside
        if one["wrong"]:
            told.append(f"{one['name']}: {one['wrong']}")
        elif wanted not in (litter.EITHER, one["became"]) and not (
            wanted == litter.REFUSED and empty
        ):
            told.append(f"{one['name']}: {one['became']} ({one['text']})")
    told += [f"{one['name']}: {one['wrong']}" for one in said["changing"] if one["wrong"]]
    return told


def slowest_output(name: str) -> tuple[float, str]:
    said = of(name)
    every = (*said["left"]["took"], *said["deep"]["took"], *said["changing"])
    return max((one["took_s"], one["name"]) for one in every)


def table(names: Sequence[str]) -> str:
    """Attack by runtime, for people."""
    columns = {name: verdicts(name) for name in names}
    proved = controls() if CONTROL in names else {}
    width = max(map(len, ATTACKS)) + 1
    lines = [" " * width + "  ".join(f"{name:22}" for name in names) + "  control"]
    group = ""
    for attack in ATTACKS.values():
        if attack.group != group:
            group = attack.group
            lines += ["", group]
        cells = (f"{columns[name].get(attack.name, '-')[:22]:22}" for name in names)
        lines.append(
            f"{attack.name:{width}}" + "  ".join(cells) + "  " + proved.get(attack.name, "-")
        )
    lines.append("")
    for name in names:
        cells = list(columns[name].values())
        worst_s, worst = slowest_output(name)
        outputs = len(of(name)["left"]["took"]) + len(of(name)["deep"]["took"])
        lines.append(
            f"{name}: {len(cells)} attacks, {sum(c not in ('refused', 'own kernel') for c in cells)} escapes, "
            f"{sum(c == 'own kernel' for c in cells)} met the sandbox's own kernel; "
            f"{len(stage(name)['words'])} secrets, {len(found(name))} found; {outputs} hostile outputs, "
            f"{len(wrong_outputs(name))} wrong, slowest {worst_s:.2f} s ({worst}); "
            f"{len(stage(name)['changes'])} changes of the host; {of(name)['took_s']:.0f} s"
        )
    unproved = [f"{name} ({why})" for name, why in proved.items() if why not in ("host", "guest")]
    lines += ["", f"not proved by a control: {', '.join(unproved) or 'none'}"]
    return "\n".join(lines)
