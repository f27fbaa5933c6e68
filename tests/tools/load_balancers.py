"""The shipped nginx and HAProxy configurations with other addresses, run by the real programs. For tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpool.server.clock import SystemClock
from gpool.server.identity.certificates import make
from tests.tools.processes import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "proxies"


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    assert found is not None
    return found


def nginx(folder: Path, port: int, servers: Sequence[int], connections: int = 512) -> list[str]:
    """Command line of nginx for the shipped file: other addresses and files, and a frame of what Debian's nginx.conf has."""
    text = (EXAMPLES / "nginx.conf").read_text()
    line = "    server 127.0.0.1:8642 max_fails=1 fail_timeout=10s;\n"
    assert text.count(line) == 1
    text = text.replace(line, "".join(line.replace("8642", str(each)) for each in servers))
    text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    text = text.replace("/etc/gpool/tls", str(folder))
    (folder / "site.conf").write_text(text)
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/nginx.pid;\nworker_processes 1;\n"
        + ("user root;\n" if os.geteuid() == 0 else "")
        + f"worker_rlimit_nofile {4 * connections};\n"
        + f"events {{ worker_connections {connections}; }}\n"
        + f"http {{ access_log off; client_body_temp_path {folder}/body; "
        + f"proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi; "
        + f"uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi; "
        + f"include {folder}/site.conf; }}\n"
    )
    return [program("nginx"), "-c", f"{folder}/nginx.conf", "-e", f"{folder}/nginx.log"]


def haproxy(folder: Path, port: int, servers: Sequence[int]) -> list[str]:
    text = (EXAMPLES / "haproxy.cfg").read_text()
    line = "    server gpool-1 127.0.0.1:8642\n"
    assert text.count(line) == 1
    replicas = (line.replace("gpool-1", f"gpool-{each}").replace("8642", f"{each}") for each in servers)  # fmt: skip
    text = text.replace(line, "".join(replicas)).replace("bind :443", f"bind 127.0.0.1:{port}")
    (folder / "haproxy.cfg").write_text(text.replace("/etc/gpool/tls", str(folder)))
    return [program("haproxy"), "-db", "-f", f"{folder}/haproxy.cfg"]


KINDS: dict[str, Callable[[Path, int, Sequence[int]], list[str]]] = {
    "nginx": nginx,
    "haproxy": haproxy,
}


def write_certificate(folder: Path) -> Path:
    """For `localhost`, trusted by who is given the file: in place of one that an authority signed."""
    folder.mkdir()
    made = make(["localhost"], SystemClock().now())
    (folder / "tls.crt").write_bytes(made.certificate_pem)
    (folder / "tls.key").write_bytes(made.key_pem)
    (folder / "tls.pem").write_bytes(made.certificate_pem + made.key_pem)
    return folder / "tls.crt"


@contextmanager
def running(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        child = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(PATIENCE_S)
