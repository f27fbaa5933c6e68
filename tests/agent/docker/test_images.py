"""Names of images, and a pull's progress folded from what the engine says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.runtime.docker.engine import facts_from
from gpool.agent.runtime.docker.images import (
    ContainerImage,
    ImagePull,
    advance,
    answers_to,
    follow,
    image_from,
    wrong_reference,
)

A, B = "a" * 64, "b" * 64
layers = st.sampled_from(["one", "two", "three"])
statuses = st.sampled_from(
    [
        "Pulling fs layer",
        "Waiting",
        "Downloading",
        "Download complete",
        "Extracting",
        "Pull complete",
    ]
)
documents = st.fixed_dictionaries(
    {"id": layers, "status": statuses},
    optional={
        "progressDetail": st.fixed_dictionaries(
            {}, optional={"current": st.integers(0, 99), "total": st.integers(0, 99)}
        )
    },
)


@given(st.lists(documents, max_size=40))
def test_a_pull_never_goes_backwards(said: list[dict[str, Any]]) -> None:
    pull = ImagePull("python:3.11")
    for document in said:
        following = advance(pull, document)
        assert following.done >= pull.done
        assert set(following.layers) >= set(pull.layers)
        for layer, (here, whole) in pull.layers.items():
            assert following.layers[layer] >= (here, whole) or following.layers[layer][1] >= whole
            assert following.layers[layer][0] >= here
        pull = following
    assert all(here <= whole for here, whole in pull.layers.values())


def test_a_pulls_text_counts_layers_and_megabytes() -> None:
    heard: list[str] = []
    said = [
        {"status": "Pulling from library/python", "id": "3.11"},
        {"status": "Pulling fs layer", "id": "one"},
        {"status": "Pulling fs layer", "id": "two"},
        {"status": "Downloading", "id": "one", "progressDetail": {"current": 1e6, "total": 4e6}},
        {"status": "Pull complete", "id": "two"},
    ]
    pull = follow("python:3.11", iter(said), lambda step: heard.append(step.text))
    assert heard[0] == "pulling python:3.11"
    assert pull.text == "pulling python:3.11: 1 of 2 layers, 1 of 4 MB"


def test_a_failed_pull_says_why() -> None:
    pull = follow("x", iter([{"error": "manifest unknown"}]), lambda step: None)
    assert pull.text == "cannot pull x: manifest unknown"


@pytest.mark.parametrize(
    "name",
    [
        "python",
        "python:3.11",
        "a.example:5000/b/c:t",
        f"a/b@sha256:{A}",
        f"a:1@sha256:{A}",
        f"sha256:{A}",
    ],
)
def test_names_of_images_pass(name: str) -> None:
    assert wrong_reference(name) == ""


@pytest.mark.parametrize(
    "name",
    ["", "-v", "../x", "a b", "A/b", "a@sha256:12", "/etc", "a/../b", "x?y=z", "é", "a" * 600],
)
def test_what_is_no_name_never_reaches_the_engine(name: str) -> None:
    assert "is no image reference" in wrong_reference(name)


def test_a_digest_is_answered_only_by_that_content() -> None:
    image = ContainerImage(f"sha256:{A}", 1, (f"python@sha256:{B}",))
    assert answers_to(image, "python:3.11")
    assert answers_to(image, f"python@sha256:{B}")
    assert answers_to(image, f"sha256:{A}")
    assert not answers_to(image, f"python@sha256:{'c' * 64}")


def test_an_image_tells_its_volumes_and_size() -> None:
    config = {"Volumes": {"/b": {}, "/a": {}}, "Env": ["PATH=/bin:/usr", "EMPTY="]}
    image = image_from({"Id": "sha256:1", "Size": 7, "RepoTags": ["x:1"], "Config": config})
    assert image == ContainerImage(
        "sha256:1", 7, ("x:1",), ("/a", "/b"), (("PATH", "/bin:/usr"), ("EMPTY", ""))
    )


def test_an_engine_with_remapped_users_tells_its_first_uid() -> None:
    info = {"SecurityOptions": ["name=seccomp", "name=userns"], "DockerRootDir": "/d/165536.165536"}
    assert facts_from(info, {}).first_uid == 165536
    assert facts_from({**info, "SecurityOptions": []}, {}).first_uid == 0


def test_only_an_engine_that_says_so_is_asked_for_certain_cpus() -> None:
    assert facts_from({"CPUSet": True}, {}).cpusets
    assert not facts_from({"CPUSet": False}, {}).cpusets
    assert not facts_from({}, {}).cpusets
