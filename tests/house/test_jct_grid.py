"""The grid of `bench.jct_grid`: windows that never change, and limits that fail where they should."""

from __future__ import annotations

from bench.jct_grid import failures, table, windows

Cell = dict[str, dict[str, object]]


def a_cell(**own: float) -> Cell:
    same = {"jct_s": 1000, "stops_a_job": 0.5, "wait_p99_s": 100, "wait_max_s": 500, "cpu_s": 10}
    return {
        "FIFO": {**same, "jct_s": 10_000},
        "LAS": {**same},
        "MLFQ": {**same, "jct_s": 1100, "wait_max_s": 450},
        "gpool": {**same, "wait_max_s": 450, **own},
    }


def test_the_drawn_windows_are_those_of_the_seed() -> None:
    assert windows()["drawn-1"] == ("2017-10-13", "2017-11-11")
    assert windows()["drawn-2"] == ("2017-09-29", "2017-11-09")


def test_a_cell_fails_by_each_limit_alone() -> None:
    assert failures("november", 56, a_cell()) == []
    beyond = {
        "jct_s": 1021,
        "stops_a_job": 0.61,
        "wait_p99_s": 111,
        "wait_max_s": 451,
        "cpu_s": 201,
    }
    for field, value in beyond.items():
        (found,) = failures("november", 56, a_cell(**{field: value}))
        assert found.startswith(field)


def test_october_at_72_nodes_is_also_measured_against_fifo() -> None:
    cell = a_cell()
    cell["FIFO"]["jct_s"] = 3999
    assert failures("october", 72, cell) == ["jct_s 1000 > 999.75"]
    assert failures("october", 56, cell) == []


def test_the_table_has_a_line_for_each_complete_cell() -> None:
    cells = {("november", 40): a_cell(), ("november", 56): {"FIFO": a_cell()["FIFO"]}}
    assert len(table(cells).splitlines()) == 3
