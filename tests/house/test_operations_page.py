"""What the operations page says can be set can be set."""

from __future__ import annotations

import re
from pathlib import Path

from gpool.server.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_every_server_variable_on_the_page_is_a_setting() -> None:
    named = set(re.findall(r"GPOOL_SERVER_([A-Z_]+)", PAGE.read_text()))
    assert named <= {field.upper() for field in Settings.model_fields}


def test_the_lease_times_on_the_page_are_the_defaults() -> None:
    defaults = [Settings.model_fields[name].default for name in ("ttl_s", "margin_s", "beat_s")]
    assert "Defaults: {:g} s, {:g} s, {:g} s.".format(*defaults) in PAGE.read_text()
