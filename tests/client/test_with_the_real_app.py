"""The real SDK against the real application, in one process, without a socket."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx2
import pytest
from click.testing import CliRunner

import gpool
from gpool import Client
from gpool.cli.main import cli
from gpool.client.artifacts import gather
from gpool.client.options import Options
from gpool.client.runs import printed
from gpool.transfer.requests import PART_BYTES
from tests.client.inprocess import Node, RealPool
from tests.tools.processes import PATIENCE_S


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("data"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def node(real: RealPool) -> Iterator[Node]:
    joined = real.join()
    yield joined
    joined.close()


@pytest.fixture
def sdk(real: RealPool) -> Iterator[Client]:
    with Client("http://pool.test", real.key, transport=real.transport) as client:
        yield client


def test_a_task_nobody_can_take_waits_and_says_why_and_can_be_cancelled(
    sdk: Client, node: Node
) -> None:
    run = sdk.task(gpu="H100")(lambda: 1).submit()
    assert run.status == "queued"
    assert run.explain()
    run.cancel()
    assert run.status == "cancelled"
    with pytest.raises(gpool.Cancelled):
        run.result(timeout=PATIENCE_S)


def test_a_batch_can_be_waited_for_by_its_id(sdk: Client, node: Node) -> None:
    half = sdk.task(lambda x: 1 / x)
    list(half.map([1, 0, 2], return_exceptions=True))
    [newest] = sdk.listing("tasks", limit=1)
    results = list(sdk.ended(newest["batch"], timeout=PATIENCE_S))
    assert [result.sequence for result in results] == [1, 2, 3]
    assert [result.position for result in results if result.status != "succeeded"] == [1]
    assert sdk.batch(newest["batch"])["total"] == 3
    said = CliRunner().invoke(cli, ["wait", newest["batch"]], obj=sdk)
    assert (said.exit_code, "1 of the 3 tasks" in said.stderr) == (1, True)
    with pytest.raises(gpool.NotFound):
        list(sdk.ended("b-0000000000001"))


def test_a_key_that_may_not_read_may_cancel_a_batch_all_the_same(
    sdk: Client, real: RealPool, node: Node
) -> None:
    batch = sdk.task(gpu="H100")(lambda: 1).submit().document()["batch"]
    wanted = {"name": "writes", "scopes": ["tasks:write"]}
    key = sdk.api.send_json("POST", "/v1/keys", wanted)["key"]
    with Client("http://pool.test", key, transport=real.transport) as writing:
        CliRunner().invoke(cli, ["cancel", batch], obj=writing)
    [ended] = sdk.ended(batch, timeout=PATIENCE_S)
    assert ended.status == "cancelled"


def test_values_and_exceptions_come_back(sdk: Client, node: Node) -> None:
    half = sdk.task(lambda x: 1 / x)
    assert half.remote(2) == 0.5
    with pytest.raises(ZeroDivisionError) as caught:
        half.remote(0)
    assert "ZeroDivisionError" in str(caught.value.__cause__)


def test_map_streams_thousands_in_order(sdk: Client, node: Node) -> None:
    assert list(sdk.task(lambda x: x + 1).map(range(3000))) == list(range(1, 3001))


@pytest.mark.parametrize("count", [0, 1, 64, 192])
def test_map_ends_at_any_count(sdk: Client, node: Node, count: int) -> None:
    assert list(sdk.task(lambda x: x).map(range(count))) == list(range(count))


def test_a_failing_map_cancels_its_batch(sdk: Client, node: Node) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(sdk.task(int).map(["1", "x", *map(str, range(100))]))


def test_large_arguments_and_values_travel_as_artifacts(sdk: Client, node: Node) -> None:
    data = bytes(range(256)) * 1024
    assert sdk.task(lambda d: d * 2).remote(data) == data * 2


def test_a_command_brings_back_what_it_printed_and_left(
    sdk: Client, real: RealPool, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "data.txt").write_text("hello")
    real.command = lambda spec: (
        3,
        [(1, b"out\n"), (2, b"err\n")],
        {"model/weights": spec.inputs[0].path.encode()} if spec.inputs else {},
    )
    done = sdk.run(["python", "x.py"], inputs=["in"], outputs=["model/"], into=tmp_path / "got")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert (tmp_path / "got/model/weights").read_text() == "in/data.txt"
    with pytest.raises(gpool.TaskFailed, match="exited with code 3"):
        sdk.run(["false"], check=True)


def test_following_a_finished_tasks_logs_ends(sdk: Client, real: RealPool, node: Node) -> None:
    real.command = lambda _: (0, [(1, b"a"), (1, b"b")], {})
    run = sdk.submit_command(["x"])
    assert "".join(run.logs(follow=True)) == "ab"
    assert run.wait().status == "succeeded"


class Stumbling(httpx2.BaseTransport):
    """The way to the real application, broken at the second and fourth part."""

    def __init__(self, way: httpx2.BaseTransport) -> None:
        self._way = way
        self.parts: list[str] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT":
            self.parts.append(request.headers["content-range"])
            if len(self.parts) in (2, 4):
                raise httpx2.WriteError("stumbled")
        return self._way.handle_request(request)


@pytest.mark.parametrize("source", ["file", "memory"])
def test_a_broken_upload_goes_on_at_the_part_the_server_lacks(
    real: RealPool, tmp_path: Path, source: str
) -> None:
    content = Random(source).randbytes(2 * PART_BYTES + 9)
    (tmp_path / "big").write_bytes(content)
    way = Stumbling(real.transport)
    told: list[int] = []
    with Client("http://pool.test", real.key, transport=way) as client:
        if source == "memory":
            sha256 = client.artifacts.put(content)
        else:
            [file] = gather(["big"], tmp_path)
            sha256 = client.artifacts.put_file(file, lambda _path, done, _total: told.append(done))
            assert told == [0, *[PART_BYTES] * 2, *[2 * PART_BYTES] * 2, len(content)]
        starts = [int(part.removeprefix("bytes ").split("-")[0]) for part in way.parts]
        assert starts == [0, PART_BYTES, PART_BYTES, 2 * PART_BYTES, 2 * PART_BYTES]
        assert client.artifacts.get(sha256) == content


BINARY = [b"\xe6\xbc", b"\xa2 \xff\x00", bytes(range(256)), "漢\n".encode(), b"\xe2\x82"]


@pytest.mark.parametrize("follow", [True, False])
def test_output_comes_back_byte_by_byte_and_readable(
    sdk: Client, real: RealPool, node: Node, follow: bool
) -> None:
    real.command = lambda _: (0, [(1, data) for data in BINARY], {})
    run = sdk.submit_command(["x"])
    run.wait()
    documents = list(run.log_documents(follow=follow))
    assert [one["data"] is None for one in documents] == [False, False, False, True, False]
    pieces = list(run.printed(follow=follow))
    assert b"".join(piece.data for piece in pieces) == b"".join(BINARY)
    assert "".join(piece.text for piece in pieces) == b"".join(BINARY).decode(errors="replace")


def test_a_character_cut_by_a_reconnect_is_whole_for_the_reader(
    sdk: Client, real: RealPool, node: Node
) -> None:
    real.command = lambda _: (0, [(1, b"\xe6\xbc"), (1, b"\xa2")], {})
    run = sdk.submit_command(["x"])
    run.wait()
    first, second = run.log_documents()
    (again,) = sdk.api.get_json(f"/v1/tasks/{run.id}/logs?after={first['cursor']}")["items"]
    assert (second["text"], again["data"]) == ("漢", second["data"])
    assert [piece.text for piece in printed([first, again])] == ["", "漢"]


def test_the_command_line_passes_bytes_on_unchanged(
    sdk: Client, real: RealPool, node: Node
) -> None:
    real.command = lambda _: (0, [(1, data) for data in BINARY], {})
    ran = CliRunner().invoke(cli, ["run", "--", "x"], obj=sdk)
    assert (ran.exit_code, ran.stdout_bytes) == (0, b"".join(BINARY))
    task = sdk.listing("tasks", limit=1)[0]["id"]
    for args in (["logs", task], ["logs", "-f", task]):
        assert CliRunner().invoke(cli, args, obj=sdk).stdout_bytes == b"".join(BINARY)


def test_errors_arrive_as_the_classes_the_server_raised(sdk: Client, real: RealPool) -> None:
    with pytest.raises(gpool.NotFound):
        sdk.get("t-0000000000007")
    with pytest.raises(gpool.Invalid):
        sdk.get("nonsense")
    with pytest.raises(gpool.Invalid) as caught:
        sdk.submit_command(["x"], options=gpool.client.options.Options(gpu="H1:x:y"))  # type: ignore[attr-defined]
    assert type(caught.value).__name__ == "BadGpuSpec"
    with (
        Client("http://pool.test", "gpk_wrong", transport=real.transport) as stranger,
        pytest.raises(gpool.NotSignedIn),
    ):
        stranger.listing("tasks")


def test_listings_are_paged_and_limited(sdk: Client, real: RealPool, node: Node) -> None:
    for _ in range(5):
        sdk.task(lambda: 1).remote()
    assert len(sdk.listing("tasks", limit=3)) == 3
    everything = sdk.listing("tasks")
    assert len({task["id"] for task in everything}) == len(everything) >= 5
    assert [one["name"] for one in sdk.listing("nodes")] == ["node"]


def test_a_script_with_packages_runs_and_whoever_follows_sees_it_being_built(
    sdk: Client, node: Node, real: RealPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text('# /// script\n# dependencies = ["numpy"]\n# ///\n')
    specs = []
    real.command = lambda spec: specs.append(spec) or (0, [(1, b"done\n")], {})
    words = ["run", "--network", "egress", "--checkpoint", "state/", "train.py", "--lr", "1"]
    done = CliRunner().invoke(cli, words, obj=sdk)
    assert (done.exit_code, done.stdout) == (0, "done\n"), done.output
    [spec] = specs
    assert spec.command == ("python", "train.py", "--lr", "1")
    assert spec.recipe is not None
    assert spec.recipe.packages == ("numpy",)
    assert (spec.checkpoint, [file.path for file in spec.inputs]) == ("state/", ["train.py"])
    run = sdk.submit_command(["true"], options=Options(pip=["numpy"]))
    run.wait()
    phases = [event["event"] for event in sdk.api.get_json(f"/v1/tasks/{run.id}/events")]
    assert phases == ["queued", "leased", "build", "started", "succeeded"]


def test_what_the_server_refuses_comes_with_its_reason(sdk: Client, node: Node) -> None:
    other = "3.9" if sys.version_info.minor != 9 else "3.10"
    with pytest.raises(gpool.Invalid, match=f"wants Python {other}"):
        sdk.task(python=other)(lambda: 1).submit()
    with pytest.raises(gpool.Invalid, match="applies to commands"):
        sdk.task(checkpoint="state/")(lambda: 1).submit()
