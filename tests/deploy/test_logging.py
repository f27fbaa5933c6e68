"""deploy/logging: a real rsyslogd ships the log of a real server to a stub of Elasticsearch's bulk interface; the files
for Filebeat, Logstash and Elasticsearch are validated, since those programs are not available here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from gpool.observability.ecs import ECS_VERSION
from tests.tools.ecs import declared, problems
from tests.tools.processes import PATIENCE_S, SHORT_LEASE, Pool, eventually

LOGGING = Path(__file__).parents[2] / "deploy/logging"


class BulkStub(ThreadingHTTPServer):
    """Elasticsearch's `_bulk`: takes `create` actions. Its port refuses connections until `recover`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Bulk, bind_and_activate=False)
        self.server_bind()
        self._thread = threading.Thread(target=self.serve_forever)
        self.created: list[tuple[str, str, str]] = []  # index, id, document

    def recover(self) -> None:
        self.server_activate()
        self._thread.start()

    def close(self) -> None:
        if self._thread.ident is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()


class _Bulk(BaseHTTPRequestHandler):
    server: BulkStub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert self.path == "/_bulk"
        lines = [line for line in body.split("\n") if line]
        items = []
        for action, document in zip(lines[::2], lines[1::2], strict=True):
            create = json.loads(action)["create"]
            self.server.created.append((create["_index"], create["_id"], document))
            items.append({"create": {"_id": create["_id"], "status": 201}})
        self._answer(200, {"took": 1, "errors": False, "items": items})

    def do_HEAD(self) -> None:
        self._answer(200, None)

    do_GET = do_HEAD

    def _answer(self, status: int, document: object) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def bulk_stub() -> Iterator[BulkStub]:
    stub = BulkStub()
    try:
        yield stub
    finally:
        stub.close()


@contextmanager
def rsyslogd(folder: Path, logs: Path, port: int) -> Iterator[None]:
    program = shutil.which("rsyslogd") or "/usr/sbin/rsyslogd"
    config = str(LOGGING / "rsyslog/gpool.conf")
    variables = {
        **os.environ,
        "RSYSLOG_WORK": str(folder),
        "GPOOL_LOG_FOLDER": str(logs),
        "ELASTICSEARCH_HOST": "127.0.0.1",
        "ELASTICSEARCH_PORT": str(port),
    }
    checked = subprocess.run(
        [program, "-N1", "-f", config], env=variables, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    running = subprocess.Popen(
        [program, "-n", "-f", config, "-i", str(folder / "pid")], env=variables
    )
    try:
        yield
    finally:
        running.terminate()
        running.wait(PATIENCE_S)


def test_rsyslog_ships_every_line_once_across_an_outage(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("rsyslog")
    work, settings = tmp_path / "work", {**SHORT_LEASE, "GPOOL_SERVER_LOG_FORMAT": "json"}
    work.mkdir()
    pool = Pool(tmp_path / "pool", {**settings, "GPOOL_SERVER_LOG_LEVEL": "debug"})
    log = pool.directory / "server.log"
    with bulk_stub() as stub, rsyslogd(work, pool.directory, stub.server_port):
        try:
            pool.start(agents=())
            for number in range(50):
                pool.ask("GET", f"/v1/me?number={number}")
        finally:
            pool.stop()
        with log.open("a") as file:
            file.write('Fatal Python error: "x" \\ y\n')
        written = log.read_text().splitlines()
        stub.recover()  # until now rsyslog found nothing to connect to
        eventually("all lines arrive", lambda: len(stub.created) >= len(written), PATIENCE_S)
    assert len(written) > 50
    ours = [document for index, _, document in stub.created if "unparsed" not in index]
    assert sorted(ours) == sorted(written[:-1])
    assert len({id_ for _, id_, _ in stub.created}) == len(stub.created)
    assert {index for index, _, _ in stub.created} == {
        "logs-gpool.server-default",
        "logs-gpool.cli-default",
        "logs-gpool.unparsed-default",
    }
    types = declared()
    assert [found for line in ours for found in problems(line, types)] == []
    [crash] = [json.loads(d) for index, _, d in stub.created if "unparsed" in index]
    assert crash["message"] == 'Fatal Python error: "x" \\ y'
    assert crash["ecs.version"] == ECS_VERSION


def test_filebeat_reads_each_line_as_a_document_of_our_data_streams() -> None:
    told = yaml.safe_load((LOGGING / "filebeat/filebeat.yml").read_text())
    [stream] = told["filebeat.inputs"]
    assert stream["type"] == "filestream"
    assert stream["id"]
    [parser] = stream["parsers"]
    assert parser["ndjson"] == {
        "target": "",
        "overwrite_keys": True,
        "expand_keys": True,
        "add_error_key": True,
    }
    assert told["output.elasticsearch"]["index"].startswith("logs-%{[data_stream.dataset]}-")
    [pattern] = template()["index_patterns"]
    assert re.fullmatch(pattern.replace("*", ".+"), "logs-gpool.server-default")
    assert "setup.template.enabled" in told  # ours is installed instead


def template() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((LOGGING / "elasticsearch/index-template.json").read_text())
    return made


PROCESSORS = {
    "dot_expander": {"field"},
    "set": {"field"},
    "lowercase": {"field"},
    "append": {"field", "value"},
}
"""Ingest processors used, with the options that Elasticsearch requires."""


def test_the_ingest_pipeline_is_the_template_s_and_its_processors_are_complete() -> None:
    pipeline = json.loads((LOGGING / "elasticsearch/ingest-pipeline.json").read_text())
    assert set(pipeline) <= {"description", "processors", "on_failure", "version", "_meta"}
    for processor in (*pipeline["processors"], *pipeline["on_failure"]):
        [(kind, options)] = processor.items()
        assert PROCESSORS[kind] <= set(options)
        assert kind != "set" or ("value" in options) != ("copy_from" in options)
    assert template()["template"]["settings"]["index"]["default_pipeline"] == "gpool-logs"
    readme = (LOGGING / "README.md").read_text()
    assert "_ingest/pipeline/gpool-logs" in readme


# ---- Logstash's configuration language

OPTIONS = {
    "beats": {"port", "ecs_compatibility"},
    "tcp": {"port", "ecs_compatibility", "codec"},
    "de_dot": {"nested"},
    "date": {"match", "target"},
    "mutate": {"add_field", "replace"},
    "elasticsearch": {
        "hosts",
        "api_key",
        "data_stream",
        "data_stream_type",
        "data_stream_auto_routing",
    },
}
"""Plugins used, with options that their documentation lists."""


def test_logstash_s_pipeline_has_three_stages_of_documented_plugins() -> None:
    text = (LOGGING / "logstash/gpool.conf").read_text()
    bare = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: '"' + "s" * len(found[0]) + '"', bare)
    depth = 0
    for letter in bare:
        depth += (letter in "{[") - (letter in "}]")
        assert depth >= 0
    assert depth == 0
    assert re.findall(r"^(\w+) \{$", bare, re.MULTILINE) == ["input", "filter", "output"]
    used: dict[str, set[str]] = {}
    plugin = ""
    for line in bare.splitlines():
        if begun := re.match(r"^ {2,4}(\w+) \{", line):
            plugin = begun[1]
            used.setdefault(plugin, set()).update(re.findall(r"\{ (\w+) =>", line))
        elif option := re.match(r"^ {4}(\w+) =>", line):
            used[plugin].add(option[1])
    assert set(used) == set(OPTIONS)
    for name, options in used.items():
        assert options <= OPTIONS[name], name
