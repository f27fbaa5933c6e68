"""File descriptors of a server process: the soft limit is raised, and a part is reserved for channels of nodes."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, resource, sys
from gpool.server.main import http_limits, raise_descriptor_limit
from gpool.server.settings import Settings

resource.setrlimit(resource.RLIMIT_NOFILE, (300, int(sys.argv[1])))
before = http_limits(Settings()).total
raise_descriptor_limit()
soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
print(json.dumps([before, soft, http_limits(Settings()).total]))
"""


def test_a_quarter_of_the_raised_limit_is_reserved_for_nodes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, "4000"], capture_output=True, check=True, text=True
    )
    before, soft, total = json.loads(done.stdout)
    assert soft == 4000
    assert before < 300 * 3 / 4  # the control: without the raise
    assert 2000 < total < 4000 * 3 / 4
