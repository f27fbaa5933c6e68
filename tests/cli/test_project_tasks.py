"""`gpool run :NAME` through a real pool, and the tasks of examples/catalogue, each run as its node would."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpool import Client
from gpool.cli.main import cli
from gpool.core.model import TaskSpec
from tests.client.inprocess import RealPool
from tests.tools.processes import PATIENCE_S

CATALOGUE = Path(__file__).parents[2] / "examples" / "catalogue"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("data"))
    node = pool.join()
    yield pool
    node.close()
    pool.close()


@pytest.fixture
def sdk(pool: RealPool) -> Iterator[Client]:
    with Client("http://pool.test", pool.key, transport=pool.transport) as client:
        yield client


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = tmp_path / "project"
    shutil.copytree(CATALOGUE, copied)
    monkeypatch.chdir(copied)
    return copied


class Execution:
    """Runs a granted command in a folder with its inputs; `specs` are those it ran."""

    def __init__(self, pool: RealPool, sdk: Client, folder: Path) -> None:
        self.specs: list[TaskSpec] = []
        self._sdk, self._folder = sdk, folder
        folder.mkdir()
        pool.command = self.run

    def run(self, spec: TaskSpec) -> tuple[int, list[tuple[int, bytes]], dict[str, bytes]]:
        self.specs.append(spec)
        for file in spec.inputs:
            path = self._folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._sdk.artifacts.get(file.sha256))
        words = [sys.executable if word == "python" else word for word in spec.command]
        done = subprocess.run(
            words, cwd=self._folder, capture_output=True, check=False, timeout=PATIENCE_S
        )
        left = {
            name: (self._folder / name).read_bytes()
            for name in spec.outputs
            if (self._folder / name).is_file()
        }
        return done.returncode, [(1, done.stdout), (2, done.stderr)], left


@pytest.fixture
def execution(pool: RealPool, sdk: Client, tmp_path: Path) -> Execution:
    return Execution(pool, sdk, tmp_path / "node")


def typed(sdk: Client, *words: str) -> Result:
    said = CliRunner().invoke(cli, ["run", *words], obj=sdk)
    assert said.exit_code == 0, said.output
    return said


def test_a_monte_carlo_simulation_agrees_with_the_formula(
    sdk: Client, project: Path, execution: Execution
) -> None:
    said = typed(sdk, ":monte-carlo", "--samples", "50000", "--strike=110", "--seed", "7")
    found = json.loads(said.stdout)
    normal = statistics.NormalDist().cdf
    near = (math.log(100 / 110) + (0.03 + 0.02)) / 0.2
    exact = 100 * normal(near) - 110 * math.exp(-0.03) * normal(near - 0.2)
    assert abs(found["price"] - exact) < 5 * found["standard_error"]
    [spec] = execution.specs
    assert spec.command[:2] == ("python", "monte_carlo.py")
    assert sdk.listing("tasks", limit=1)[0]["name"] == "monte-carlo"


def test_shards_of_a_sweep_are_the_trials_of_the_whole(
    sdk: Client, project: Path, execution: Execution
) -> None:
    def trials(*words: str) -> list[str]:
        typed(sdk, ":sweep", "--trials", "6", *words)
        return (project / "trials.jsonl").read_text().splitlines()

    whole = trials()
    parts = trials("--shards", "2") + trials("--shards", "2", "--shard", "1")
    assert sorted(whole) == sorted(parts)
    assert max(json.loads(one)["accuracy"] for one in whole) > 0.85


def test_bands_of_an_image_are_the_rows_of_the_whole(
    sdk: Client, project: Path, execution: Execution
) -> None:
    def pixels(*words: str) -> bytes:
        typed(sdk, ":render", "--width", "32", "--height", "18", "--shadows", *words)
        return (project / "image.ppm").read_bytes().partition(b"\n")[2]

    whole = pixels()
    assert len(whole) == 32 * 18 * 3
    assert pixels("--rows", "9") + pixels("--rows", "9", "--first-row", "9") == whole
    assert len(set(whole)) > 50


def test_batch_inference_labels_every_line(
    sdk: Client, project: Path, execution: Execution, require: Callable[[str], None]
) -> None:
    require("torch")
    typed(sdk, ":batch-inference", "--batch-size", "4")
    labels = [json.loads(line) for line in (project / "labels.jsonl").read_text().splitlines()]
    assert [one["text"] for one in labels] == (project / "texts.txt").read_text().splitlines()
    assert {file.path for file in execution.specs[0].inputs} == {"texts.txt", "batch_inference.py"}
    assert execution.specs[0].recipe is not None
    assert "torch" in execution.specs[0].recipe.packages


def test_fine_tuning_goes_on_from_its_checkpoint(
    sdk: Client, project: Path, execution: Execution, require: Callable[[str], None]
) -> None:
    require("torch")
    first = typed(sdk, ":finetune", "--epochs", "2").stdout
    again = typed(sdk, ":finetune", "--epochs", "6").stdout  # the node's folder has the state
    assert "resumed after epoch 1" in again
    losses = [float(line.split()[-1]) for line in (first + again).splitlines() if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2
    assert (project / "model.pt").stat().st_size > 0
    spec = execution.specs[0]
    assert spec.checkpoint == "state/"
    assert spec.preemptible


def test_options_of_the_command_line_come_before_those_of_the_task(
    sdk: Client, project: Path, execution: Execution
) -> None:
    nested = project / "deep" / "er"
    nested.mkdir(parents=True)
    (project / "gpool.toml").write_text(
        '[tasks.show]\ncommand = ["env"]\nmemory = "64MB"\ntimeout = "1m"\nenv = { A = "1", B = "2" }\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(nested)  # the file is found above
        typed(sdk, "--timeout", "2m", "--env", "B=3", "--name", "mine", ":show")
    [spec] = execution.specs
    assert spec.requirements.memory_bytes == 64_000_000
    assert spec.timeout == 120_000_000
    assert dict(spec.env) == {"A": "1", "B": "3"}
    assert sdk.listing("tasks", limit=1)[0]["name"] == "mine"


def test_help_shows_the_parameters_and_needs_no_pool(project: Path) -> None:
    said = CliRunner().invoke(cli, ["run", ":render", "--help"])
    assert said.exit_code == 0
    assert "--first-row" in said.output
    assert "from 16, to 8192, default 160" in said.output


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([":rendr"], "it has: batch-inference, finetune, sweep, render, monte-carlo"),
        ([":render", "--width", "1"], "at least 16"),
        ([":render", "--depth", "1"], "no parameter"),
    ],
)
def test_a_mistake_is_named_before_anything_is_sent(
    sdk: Client, project: Path, words: list[str], part: str
) -> None:
    said = CliRunner().invoke(cli, ["run", *words], obj=sdk)
    assert said.exit_code != 0
    assert part in said.output + str(getattr(said.exception, "detail", ""))


def test_a_missing_file_is_named(
    sdk: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli, ["run", ":train"], obj=sdk)
    assert "there is no gpool.toml" in said.output + str(getattr(said.exception, "detail", ""))
