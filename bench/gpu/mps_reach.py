"""What of an MPS daemon lies in reach of a sandboxed client: its commands, its pipes, the way around it. Root; JSON lines."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sharing_probe import (
    CLIENT,
    UID,
    box,
    bwrap,
    dropped,
    end_below,
    gpu_processes,
    lines,
    out,
    pause,
    running,
    say,
)

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


def case(
    kind: str,
    daemon_uid: int,
    options: list[str],
    only: list[str] | None,
    mode: int,
    *,
    fake_root: bool = False,
) -> None:
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
    lead = []
    if fake_root:  # root in a user namespace of its own, nobody on the host
        lead = [bwrap(), "--unshare-user", "--uid", "0", "--gid", "0", "--die-with-parent"]
        lead += ["--dev-bind", "/", "/", "--"]
    try:
        with running([*lead, CONTROL, "-f", *options], preexec_fn=ours, env=env) as server:
            pause(0.7)
            limit = "set_default_device_pinned_mem_limit 0 4G\n"
            say(case=kind, set=out([*lead, CONTROL], 10, input=limit, env=env, preexec_fn=ours))
            say(case=kind, files=out(["ls", "-la", pipes]))
            binds = {INSIDE: pipes}
            if only is not None:
                binds = {f"{INSIDE}/{name}": f"{pipes}/{name}" for name in only}
            words = [sys.executable, CLIENT, "hold", f"{3 << 30},{8 << 30}"]
            with running(box(binds, {}, words), preexec_fn=dropped) as child:
                say(case=kind, client=lines(child, 3, 12))
                with running(box(binds, {}, words), preexec_fn=as_uid(UID + 5)) as stranger:
                    say(case=kind, other_uid=lines(stranger, 3, 8), processes=gpu_processes())
                attack = box(binds, {"CUDA_MPS_PIPE_DIRECTORY": INSIDE}, [CONTROL])
                say(case=kind, attack=out(attack, 6, input=RAISE, preexec_fn=dropped))
                servers = out(
                    [*lead, CONTROL], 6, input="get_server_list\nps\n", env=env, preexec_fn=ours
                )
                say(case=kind, servers=servers)
                for pid in [x for x in servers.get("out", []) if str(x).isdecimal()]:  # type: ignore[attr-defined]
                    told = f"set_device_pinned_mem_limit {pid} 0 100G\nget_device_pinned_mem_limit {pid} 0\n"
                    say(case=kind, attack_server=out(attack, 6, input=told, preexec_fn=dropped))
                    with contextlib.suppress(OSError):
                        status = Path(f"/proc/{pid}/status").read_text().splitlines()
                        say(case=kind, server=[x for x in status if x.startswith("Uid")])
            with running(box(binds, {}, words), preexec_fn=dropped) as child:
                say(case=kind, after_attack=lines(child, 3, 12))
            away = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/none"}
            with running(box(binds, away, words), preexec_fn=dropped) as child:
                say(case=kind, around=lines(child, 3, 12))
            out([*lead, CONTROL], 6, input="quit -t 1\n", env=env, preexec_fn=ours)
            end_below(server.pid)
        for name in ("control.log", "server.log"):
            with contextlib.suppress(OSError):
                say(case=kind, log=name, text=(Path(logs) / name).read_text()[-900:].splitlines())
    finally:
        for folder in (pipes, logs):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    for kind, uid, options, fake in (
        ("fake root, multiuser", OTHER, ["-M"], True),
        ("root", 0, [], False),
        ("same uid", UID, [], False),
    ):
        say(exclusive=out(["nvidia-smi", "-c", "EXCLUSIVE_PROCESS"]))
        try:
            case(kind, uid, options, ["control"], 0o755, fake_root=fake)
        except Exception as error:  # noqa: BLE001 - a probe goes on
            say(case=kind, failed=repr(error))
        finally:
            say(default=out(["nvidia-smi", "-c", "DEFAULT"]))
    scrubber = str(Path(__file__).parents[2] / "src/gpool/agent/sharing/scrubber.py")
    for _ in range(2):
        say(scrub=out([sys.executable, "-I", scrubber], 60, preexec_fn=dropped))


if __name__ == "__main__":
    main()
