"""Python programs on the pages run as they stand: every block that begins with `import gpool`."""

from __future__ import annotations

import pytest

from tests.tools.pages import Block, blocks, pages
from tests.tools.processes import Pool

PROGRAMS = [
    pytest.param(block, id=block.name)
    for page in pages()
    for block in blocks(page)
    if block.language == "python"
    and block.text.startswith("import gpool\n")
    and not block.is_parsed_only
]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 2


@pytest.mark.parametrize("block", PROGRAMS)
def test_a_program_of_a_page_runs(pool: Pool, block: Block) -> None:
    list(pool.program(block.text))
