"""What a consumer says about environments, the network, checkpoints and its own files, as it goes to the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gpool
from gpool import Client
from gpool.client.runs import TaskProgress
from tests.client.standin import Pool


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def client(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    with Client("http://pool.test", "gpk_test", transport=pool) as made:
        yield made


def test_a_function_says_what_it_needs(client: Client, pool: Pool) -> None:
    @client.task(pip=["NumPy >= 2"], network="egress", preload=["numpy"], preemptible=True)
    def double(x: int) -> int:
        return 2 * x

    assert double.remote(21) == 42
    said = pool.bodies[-1]
    assert said["recipe"] == {"packages": ["numpy>=2"]}
    assert (said["network"], said["preload"], said["preemptible"]) == ("egress", ["numpy"], True)


def test_a_plain_function_says_nothing_of_it(client: Client, pool: Pool) -> None:
    assert client.task(lambda: 1).remote() == 1
    assert set(pool.bodies[-1]) == {"name", "function", "calls"}


def test_requirements_are_read_where_the_task_is_written(client: Client, tmp_path: Path) -> None:
    (tmp_path / "needs.txt").write_text("torch==2.1  # the old one\n")
    task = client.task(requirements="needs.txt", python="3.12")(lambda: 1)
    assert task.options.members()["recipe"] == {"python": "3.12", "packages": ["torch==2.1"]}
    with pytest.raises(gpool.Invalid, match=r"missing.txt"):
        client.task(requirements="missing.txt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pip": "numpy"}, r"give a list, like pip=\['numpy'\]"),
        ({"preload": "torch"}, r"give a list, like preload=\['torch'\]"),
        ({"pip": ["git+https://x"]}, "names an address"),
        ({"image": "debian", "pip": ["numpy"]}, "an image brings its own Python"),
        ({"python": "12"}, "is not a minor version"),
        ({"grace": "soon"}, "is not a duration"),
    ],
)
def test_what_is_malformed_is_said_where_it_is_written(
    client: Client, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(gpool.Invalid, match=said):
        client.task(**options)


def test_a_folder_goes_with_a_command(client: Client, pool: Pool, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "train.py").write_text("print(1)")
    (project / "lib" / "net.py").write_text("x = 1")
    (project / "notes.md").write_text("private")
    (project / ".gpoolignore").write_text("secret*\n")
    (project / "secret.env").write_text("KEY=1")
    (tmp_path / "data.csv").write_text("1,2")
    client.run(
        ["python", "train.py"],
        workdir="project",
        ignore=["*.md"],
        inputs=["data.csv"],
        checkpoint="state/",
        checkpoint_every="5m",
        grace=30,
    )
    said = pool.bodies[-1]
    names = [one["path"] for one in said["inputs"]]
    assert names == [".gpoolignore", "lib/net.py", "train.py", "data.csv"]
    assert (said["checkpoint"], said["checkpoint_every_s"], said["grace_s"]) == ("state/", 300, 30)


def test_a_gang_is_asked_for_by_name_and_never_for_a_function(client: Client, pool: Pool) -> None:
    client.run(
        ["python", "train.py"], nodes=2, engine="ray", on_loss="end", labels=["ssd"], max_price=0.4
    )
    said = pool.bodies[-1]
    assert (said["nodes"], said["engine"], said["on_loss"]) == (2, "ray", "end")
    assert (said["labels"], said["max_price"]) == (["ssd"], 0.4)
    with pytest.raises(gpool.Invalid, match="a gang runs a command on every node"):
        client.task(nodes=2)(len)
    with pytest.raises(gpool.Invalid, match="give a list"):
        client.run(["x"], labels="ssd")


def test_local_files_lie_where_they_are_sent_to(client: Client, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a")
    (tmp_path / "b.py").write_text("b")
    client.run(["true"], inputs=[*gpool.local_files("src", to="lib/src"), "b.py"])
    assert [one["path"] for one in pool.bodies[-1]["inputs"]] == ["lib/src/a.py", "b.py"]


def test_two_files_with_one_name_are_refused(client: Client, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a")
    (tmp_path / "a.py").write_text("another")
    with pytest.raises(gpool.Invalid, match=r"would both become 'a.py'"):
        client.run(["true"], workdir="src", inputs=["a.py"])
    client.run(["true"], workdir=".", inputs=["a.py"])
    with pytest.raises(gpool.Invalid, match="the folder to ship"):
        client.run(["true"], ignore=["*.md"])


def test_whoever_follows_is_told_where_the_task_is(client: Client, pool: Pool) -> None:
    pool.progress = [
        {"epoch": 0, "status": "queued", "phase": None},
        {"epoch": 1, "status": "leased", "phase": "build", "unheard_of": 1},
    ]
    told: list[TaskProgress] = []
    run = client.submit_command(["true"])
    assert list(run.printed(follow=True, on_progress=told.append)) == []
    assert told == [TaskProgress(0, "queued", None), TaskProgress(1, "leased", "build")]
    assert list(run.printed(follow=True)) == []
