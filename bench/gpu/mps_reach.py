"""What of an MPS daemon lies in reach of a sandboxed client: its commands, its pipes, the way around it. Root; JSON lines."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sharing_probe import CLIENT, UID, box, dropped, end_below, lines, out, pause, running, say

OTHER = UID + 1
INSIDE = "/tmp/nvidia-mps"
CONTROL = shutil.which("nvidia-cuda-mps-control") or "nvidia-cuda-mps-control"
RAISE = "set_default_device_pinned_mem_limit 0 100G\nget_default_device_pinned_mem_limit 0\nget_server_list\n"


def as_uid(uid: int) -> Callable[[], None]:
    def drop() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    return drop


def case(kind: str, daemon_uid: int, options: list[str], only: list[str] | None, mode: int) -> None:
    pipes, logs = (tempfile.mkdtemp(prefix=f"mps-{what}-") for what in ("pipe", "log"))
    for folder in (pipes, logs):
        os.chown(folder, daemon_uid, daemon_uid)
        os.chmod(folder, mode)
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_LOG_DIRECTORY": logs,
        "PATH": "/usr/bin:/bin:/usr/local/nvidia/bin",
    }
    ours = as_uid(daemon_uid)
    try:
        with running([CONTROL, "-f", *options], preexec_fn=ours, env=env) as server:
            pause(0.7)
            limit = "set_default_device_pinned_mem_limit 0 4G\n"
            say(case=kind, set=out([CONTROL], 10, input=limit, env=env, preexec_fn=ours))
            say(case=kind, files=out(["ls", "-la", pipes]))
            binds = {INSIDE: pipes}
            if only is not None:
                binds = {f"{INSIDE}/{name}": f"{pipes}/{name}" for name in only}
            words = [sys.executable, CLIENT, "hold", f"{3 << 30},{8 << 30}"]
            with running(box(binds, {}, words), preexec_fn=dropped) as child:
                say(case=kind, client=lines(child, 3, 12))
                say(case=kind, files=out(["ls", "-la", pipes]))
                attack = box(binds, {"CUDA_MPS_PIPE_DIRECTORY": INSIDE}, [CONTROL])
                say(case=kind, attack=out(attack, 6, input=RAISE, preexec_fn=dropped))
                servers = out([CONTROL], 6, input="get_server_list\nps\n", env=env, preexec_fn=ours)
                say(case=kind, servers=servers)
                for pid in [x for x in servers.get("out", []) if str(x).isdecimal()]:  # type: ignore[attr-defined]
                    told = f"set_device_pinned_mem_limit {pid} 0 100G\nget_device_pinned_mem_limit {pid} 0\nquit -t 1\n"
                    say(case=kind, attack_server=out(attack, 6, input=told, preexec_fn=dropped))
                    with contextlib.suppress(OSError):
                        status = Path(f"/proc/{pid}/status").read_text().splitlines()
                        say(case=kind, server=[x for x in status if x.startswith("Uid")])
            with running(box(binds, {}, words), preexec_fn=dropped) as child:
                say(case=kind, after_attack=lines(child, 3, 12))
            away = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/none"}
            with running(box(binds, away, words), preexec_fn=dropped) as child:
                say(case=kind, around=lines(child, 3, 12))
            out([CONTROL], 6, input="quit -t 1\n", env=env, preexec_fn=ours)
            end_below(server.pid)
        for name in ("control.log", "server.log"):
            with contextlib.suppress(OSError):
                say(case=kind, log=name, text=(Path(logs) / name).read_text()[-900:].splitlines())
    finally:
        for folder in (pipes, logs):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    cases: list[tuple[str, int, list[str], list[str] | None, int]] = [
        ("same uid", UID, [], None, 0o700),
        ("same uid, only control", UID, [], ["control"], 0o700),
        ("same uid, control+log", UID, [], ["control", "log"], 0o700),
        ("other uid, multiuser", OTHER, ["-M"], None, 0o755),
        ("root, multiuser", 0, ["-M"], None, 0o755),
    ]
    for one in cases:
        try:
            case(*one)
        except Exception as error:  # noqa: BLE001 - a probe goes on
            say(case=one[0], failed=repr(error))
    say(exclusive=out(["nvidia-smi", "-c", "EXCLUSIVE_PROCESS"]))
    try:
        case("same uid, exclusive process", UID, [], None, 0o700)
    except Exception as error:  # noqa: BLE001
        say(case="exclusive process", failed=repr(error))
    finally:
        say(default=out(["nvidia-smi", "-c", "DEFAULT"]))
    subprocess.run(["nvidia-smi"], check=False)


if __name__ == "__main__":
    main()
