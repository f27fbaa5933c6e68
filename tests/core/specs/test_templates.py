"""Task templates: what they refuse, and that a command line gives the values it was made from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.specs.templates import TaskTemplate, template_of, templates_of


def train(**members: Any) -> TaskTemplate:
    return template_of("train", {"script": "train.py", **members})


PARAMETERS = {
    "lr": {"type": "float", "default": 0.1, "min": 0, "max": 1},
    "steps": {"type": "int", "min": 1},
    "model": {"default": "small", "choices": ["small", "large"]},
    "half": {"type": "bool", "default": False},
}


@given(
    lr=st.floats(0, 1),
    steps=st.integers(1, 1 << 60),
    model=st.sampled_from(["small", "large"]),
    half=st.booleans(),
    joined=st.booleans(),
)
def test_words_give_back_the_values_they_were_made_from(
    lr: float, steps: int, model: str, half: bool, joined: bool
) -> None:
    template = train(parameters=PARAMETERS)
    values = {"lr": lr, "steps": steps, "model": model, "half": half}
    words = template.words(values)
    assert words[:2] == ("python", "train.py")
    if joined:
        pairs = zip(words[2:8:2], words[3:8:2], strict=True)
        words = (*words[:2], *(f"{name}={value}" for name, value in pairs), *words[8:])
    assert template.values_of(words[2:]) == values


def test_defaults_fill_what_is_not_given_and_a_required_parameter_is_asked_for() -> None:
    template = train(parameters=PARAMETERS)
    found = template.values_of(["--steps", "3"])
    assert found == {"lr": 0.1, "steps": 3, "model": "small", "half": False}
    assert template.words(found) == (
        "python", "train.py", "--lr", "0.1", "--steps", "3", "--model", "small"
    )  # fmt: skip
    with pytest.raises(Invalid, match="train needs --steps"):
        template.values_of([])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "2"], "at most 1"),
        (["--lr", "-0.5"], "at least 0"),
        (["--lr", "nan"], "finite"),
        (["--lr", "fast"], "of type float"),
        (["--steps", "1.5"], "of type int"),
        (["--model", "huge"], "one of small, large"),
        (["--half=perhaps"], "of type bool"),
        (["--steps"], "has no value"),
        (["--lrr", "1"], "Did you mean --lr"),
        (["extra"], "no parameter 'extra'"),
        (["--model", "a\0b"], "without NUL"),
    ],
)
def test_a_wrong_value_is_refused_with_the_reason(words: list[str], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        train(parameters=PARAMETERS).values_of(words)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"command": ["ls"]}, "either 'script' or 'command'"),
        ({"script": ""}, "either 'script' or 'command'"),
        ({"gpus": 1}, "Did you mean 'gpu'"),
        ({"script": "../train.py"}, "train.py"),
        ({"outputs": ["/etc/passwd"]}, "passwd"),
        ({"inputs": "data"}, "not a list"),
        ({"env": {"A": 1}}, "table of texts"),
        ({"description": "\x1b[2J"}, "printable"),
        ({"parameters": {"help": {}}}, "not 'help'"),
        ({"parameters": {"lr": {"type": "double"}}}, "one of str, int, float, bool"),
        ({"parameters": {"lr": {"type": "int", "default": 0.5}}}, "not of type int"),
        ({"parameters": {"lr": {"type": "int", "default": 5, "max": 4}}}, "at most 4"),
        ({"parameters": {"lr": {"min": "0"}}}, "not a number"),
        ({"parameters": {"lr": {"minimum": 0}}}, "has members"),
    ],
)
def test_a_malformed_template_is_refused_with_the_reason(
    members: dict[str, Any], said: str
) -> None:
    with pytest.raises(Invalid, match=said):
        train(**members)


def test_names_and_tables_are_checked() -> None:
    with pytest.raises(Invalid, match="lower-case"):
        templates_of({"tasks": {"Train": {"script": "a.py"}}})
    with pytest.raises(Invalid, match="not a table"):
        templates_of({"tasks": ["train"]})
    assert templates_of({}) == {}
