"""A real S3 server (SeaweedFS, from its wheel) on loopback, with one bucket and one key. Ends only its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.tools.processes import PATIENCE_S, STOPPED_S, eventually, free_port

PROGRAM = Path(sys.executable).with_name("weed")
PARTS = ("s3", "master", "volume", "filer", "admin")
BUCKET = "pool"
ACCESS_KEY, SECRET_KEY = "gpool-test", "a secret of the tests"


@dataclass(frozen=True, slots=True)
class ObjectServer:
    endpoint: str
    bucket: str = BUCKET
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    def settings(self, prefix: str) -> dict[str, Any]:
        """Settings of a gpool server that keeps its artifacts below `prefix`."""
        return {
            "artifacts": f"s3://{self.bucket}/{prefix}",
            "s3_endpoint": self.endpoint,
            "s3_access_key": self.access_key,
            "s3_secret_key": self.secret_key,
        }


@contextmanager
def object_server(folder: Path) -> Iterator[ObjectServer]:
    """Serve from `folder` until the block ends."""
    identity = {
        "name": "gpool",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "identities.json"
    config.write_text(json.dumps({"identities": [identity]}))
    ports = {name: (free_port(), free_port()) for name in PARTS}  # HTTP, gRPC
    listens = [
        word
        for name, (http, grpc) in ports.items()
        for word in (f"-{name}.port={http}", f"-{name}.port.grpc={grpc}")
    ]
    command = [
        str(PROGRAM), "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", f"-s3.config={config}", f"-bucket={BUCKET}", "-webdav=false",
        "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock", *listens,
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            env={"HOME": str(folder), "PATH": os.defpath},
        )
    endpoint = f"http://127.0.0.1:{ports['s3'][0]}"
    try:
        eventually(
            "the object store is up", lambda: _answers(process, endpoint, folder), PATIENCE_S
        )
        yield ObjectServer(endpoint)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(STOPPED_S)
        for name, (_, grpc) in ports.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{grpc}.sock").unlink(missing_ok=True)


def _answers(process: subprocess.Popen[bytes], endpoint: str, folder: Path) -> bool:
    if process.poll() is not None:
        raise AssertionError((folder / "log").read_text(errors="replace")[-2000:])
    try:
        # 403: the bucket is there and needs a signature
        return httpx2.get(f"{endpoint}/{BUCKET}?list-type=2", trust_env=False).status_code == 403
    except httpx2.TransportError:
        return False
