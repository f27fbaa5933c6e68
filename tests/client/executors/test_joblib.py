"""The joblib backend: values, exceptions, options, and scikit-learn's grid search."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

import gpool
from gpool import Client


@pytest.fixture
def joblib(require: Callable[[str], None]) -> object:
    require("scikit-learn")
    importlib.import_module("gpool.joblib")
    return importlib.import_module("joblib")


def test_parallel_calls_return_in_order(sdk: Client, joblib: object) -> None:
    with joblib.parallel_config(backend="gpool", client=sdk, n_jobs=4):  # type: ignore[attr-defined]
        found = joblib.Parallel()(joblib.delayed(pow)(x, 2) for x in range(40))  # type: ignore[attr-defined]
    assert found == [x * x for x in range(40)]


def test_options_of_a_task_are_parameters_of_the_backend(sdk: Client, joblib: object) -> None:
    with joblib.parallel_config(backend="gpool", client=sdk, name="powers", n_jobs=-1):  # type: ignore[attr-defined]
        joblib.Parallel()(joblib.delayed(pow)(x, 2) for x in range(3))  # type: ignore[attr-defined]
    assert sdk.listing("tasks", limit=1)[0]["name"] == "powers"
    with (
        pytest.raises(TypeError, match="unknown option 'gpus'"),
        joblib.parallel_config(backend="gpool", client=sdk, gpus=1, n_jobs=2),  # type: ignore[attr-defined]
    ):
        joblib.Parallel()([joblib.delayed(pow)(2, 2)])  # type: ignore[attr-defined]


def test_an_exception_ends_the_loop_and_the_backend_works_on(sdk: Client, joblib: object) -> None:
    with joblib.parallel_config(backend="gpool", client=sdk, n_jobs=2):  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            joblib.Parallel()(joblib.delayed(divmod)(1, x) for x in (1, 0, 2))  # type: ignore[attr-defined]
        assert joblib.Parallel()([joblib.delayed(abs)(-1)]) == [1]  # type: ignore[attr-defined]


def test_a_grid_search_gives_the_local_result(sdk: Client, joblib: object) -> None:
    datasets = importlib.import_module("sklearn.datasets")
    model_selection = importlib.import_module("sklearn.model_selection")
    svm = importlib.import_module("sklearn.svm")
    inputs, labels = datasets.load_iris(return_X_y=True)

    def search() -> object:
        grid = {"C": [0.1, 1, 10], "gamma": [0.01, 0.1]}
        return model_selection.GridSearchCV(svm.SVC(), grid, n_jobs=4, cv=3).fit(inputs, labels)

    with joblib.parallel_config(backend="sequential"):  # type: ignore[attr-defined]
        local = search()
    with joblib.parallel_config(backend="gpool", client=sdk, name="grid"):  # type: ignore[attr-defined]
        pooled = search()
    assert local.best_params_ == pooled.best_params_  # type: ignore[attr-defined]
    scores = [found.cv_results_["mean_test_score"].tolist() for found in (local, pooled)]  # type: ignore[attr-defined]
    assert scores[0] == scores[1]
    assert len(sdk.listing("tasks", limit=50, search="grid")) >= 18


def test_without_the_import_the_backend_is_not_public() -> None:
    assert "joblib" not in gpool.__all__
