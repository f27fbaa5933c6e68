"""Files of the project beside its code: licence, workflows, issue forms, hooks, images. They are checked, not run."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.tools import recording

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml"))


def checked(schema: str, *files: Path) -> None:
    argv = [str(BIN / "check-jsonschema"), "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_are_valid_and_every_job_has_a_timeout() -> None:
    assert {path.stem for path in WORKFLOWS} == {"docs", "release", "test"}
    checked("vendor.github-workflows", *WORKFLOWS)
    checked("custom.github-workflows-require-timeout", *WORKFLOWS)


def test_issue_forms_are_valid() -> None:
    config = GITHUB / "ISSUE_TEMPLATE" / "config.yml"
    checked("vendor.github-issue-config", config)
    checked("vendor.github-issue-forms", *(path for path in FORMS if path != config))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_and_files_that_exist(path: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    commands = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    for command in commands:
        assert set(re.findall(r"\bmake ([a-z]+)", command)) <= targets
        for named in re.findall(r"(?:requirements|\.ci)/[\w.]+", command):
            assert (ROOT / named).exists(), named


def test_hooks_are_valid_and_call_tools_that_are_installed() -> None:
    path = ROOT / ".pre-commit-config.yaml"
    argv = [str(BIN / "pre-commit"), "validate-config", str(path)]
    subprocess.run(argv, check=True)
    hooks = [hook for repo in yaml.safe_load(path.read_text())["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    for hook in hooks:
        program, *words = hook["entry"].split()
        assert (BIN / Path(program).name).exists(), program
        assert [word for word in words if "/" in word and not (ROOT / word).exists()] == []


def test_the_licence_is_the_one_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n" in text
    assert "APPENDIX: How to apply the Apache License" in text


def test_both_images_are_built_from_the_hashed_locks_and_nothing_else() -> None:
    lines = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [part for part in lines.split("&&") if "pip install" in part]
    locks = [part for part in installs if "-r /requirements/" in part]
    assert [re.findall(r"requirements/(\w+)\.txt", part) for part in locks] == [
        ["server"],
        ["agent"],
    ]
    assert all("--require-hashes" in part and "--no-index" in part for part in locks)
    own = [part for part in installs if part not in locks]
    assert all("--no-deps" in part and "/wheels/gpool-*.whl" in part for part in own)
    assert len(own) == 2


def test_the_recording_of_the_readme_shows_the_commands_of_its_script() -> None:
    picture = html.unescape((ROOT / "docs/screenshots/terminal.svg").read_text(encoding="utf-8"))
    missing = [command for command in recording.COMMANDS if f"$ {command}" not in picture]
    assert missing == [], "run make recording"
    assert "<script" not in picture
