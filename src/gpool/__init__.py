"""gpool: pool GPUs. `import gpool` is cheap: a name's modules are loaded when the name is first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpool.client.client import Client as Client
    from gpool.client.client import run as run
    from gpool.client.client import task as task
    from gpool.client.executors.executor import Executor as Executor
    from gpool.client.local_files import local_files as local_files
    from gpool.client.runs import Run as Run
    from gpool.client.tasks import Task as Task
    from gpool.client.values import Completed as Completed
    from gpool.client.values import RemoteTraceback as RemoteTraceback
    from gpool.core.errors import Cancelled as Cancelled
    from gpool.core.errors import Conflict as Conflict
    from gpool.core.errors import Forbidden as Forbidden
    from gpool.core.errors import GpoolError as GpoolError
    from gpool.core.errors import Invalid as Invalid
    from gpool.core.errors import LosesNodes as LosesNodes
    from gpool.core.errors import NotFound as NotFound
    from gpool.core.errors import NotSignedIn as NotSignedIn
    from gpool.core.errors import TaskFailed as TaskFailed
    from gpool.core.errors import TimedOut as TimedOut
    from gpool.core.errors import Unreachable as Unreachable
    from gpool.core.errors import UntrustedResult as UntrustedResult
    from gpool.reporting import progress as progress
    from gpool.reporting import tqdm as tqdm

    __version__: str

_HOMES = {
    "Client": "gpool.client.client",
    "Completed": "gpool.client.values",
    "Executor": "gpool.client.executors.executor",
    "RemoteTraceback": "gpool.client.values",
    "Run": "gpool.client.runs",
    "Task": "gpool.client.tasks",
    "local_files": "gpool.client.local_files",
    "progress": "gpool.reporting",
    "run": "gpool.client.client",
    "task": "gpool.client.client",
    "tqdm": "gpool.reporting",
} | dict.fromkeys(
    (
        "Cancelled",
        "Conflict",
        "Forbidden",
        "GpoolError",
        "Invalid",
        "LosesNodes",
        "NotFound",
        "NotSignedIn",
        "TaskFailed",
        "TimedOut",
        "Unreachable",
        "UntrustedResult",
    ),
    "gpool.core.errors",
)

_ELSEWHERE = {
    "cancel": "run.cancel()",
    "function": "@gpool.task",
    "gather": "[run.result() for run in runs], or task.map(...)",
    "get": "run.result()",
    "map": "task.map(...)",
    "remote": "@gpool.task, and task.remote(...)",
    "submit": "task.submit(...)",
    "wait": "run.wait()",
}
"""Names in other libraries and the gpool name to suggest for each. They are not aliases."""

__all__ = [
    "Cancelled",
    "Client",
    "Completed",
    "Conflict",
    "Executor",
    "Forbidden",
    "GpoolError",
    "Invalid",
    "LosesNodes",
    "NotFound",
    "NotSignedIn",
    "RemoteTraceback",
    "Run",
    "Task",
    "TaskFailed",
    "TimedOut",
    "Unreachable",
    "UntrustedResult",
    "__version__",
    "local_files",
    "progress",
    "run",
    "task",
    "tqdm",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = found = importlib.import_module("gpool.version").installed_version()
        return found
    home = _HOMES.get(name)
    if home is None:
        meant = _ELSEWHERE.get(name)
        raise AttributeError(
            f"gpool has no {name!r}" + (f"; that is {meant} here" if meant else "")
        )
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
