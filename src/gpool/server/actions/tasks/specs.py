"""Conversion of a submitted request into a task spec. Refuses specs that no node could ever run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from gpool.core.errors import BadGpuSpec, Invalid, TooLarge, Unprocessable
from gpool.core.model import (
    SECOND,
    Engine,
    InputFile,
    Instant,
    Network,
    OnLoss,
    Recipe,
    Requirements,
    Span,
    TaskKind,
    TaskSpec,
    Tier,
)
from gpool.core.specs import fields
from gpool.core.specs import gpu as gpuspec
from gpool.server.verification.requests import check_verified, siblings_of
from gpool.wire.documents import TaskRequest
from gpool.wire.frames import MAX_SPEC_BYTES, weight_of

MAX_WORDS_BYTES = 128 * 1024
"""Limit of command and environment together, which every kernel accepts."""

MAX_BYTES = 1 << 50
"""One petabyte: a larger memory, disk or input size is taken for a typing error."""


def spec_of(request: TaskRequest) -> TaskSpec:
    if (request.command is None) == (request.function is None):
        raise Invalid("give exactly one of 'command' and 'function'")
    kind = TaskKind.COMMAND if request.function is None else TaskKind.FUNCTION
    if kind is TaskKind.COMMAND and request.calls is not None:
        raise Invalid("'calls' belongs to a function; for the same command many times use 'copies'")
    if kind is TaskKind.FUNCTION and request.copies != 1:
        raise Invalid("'copies' belongs to a command; a function is run once for each of 'calls'")
    command = tuple(request.command or ())
    _check_words("command", command)
    if command and not command[0]:
        raise Invalid("the command's first word is empty; it names the program to run")
    _check_env("env", request.env)
    _check_secrets(request)
    _check_words("name", [request.name or "", request.environment])
    if request.project is not None:
        fields.checked_project(request.project)
    recipe = _recipe(request)
    _check_effect(request)
    _check_gang(request, command)
    check_verified(request)
    spec = TaskSpec(
        kind=kind,
        name=request.name or _default_name(command),
        requirements=_requirements(request, recipe),
        command=command,
        function_sha256=request.function.sha256 if request.function else "",
        env=tuple(sorted(request.env.items())),
        inputs=_inputs(request),
        outputs=_outputs(request.outputs),
        timeout=Span(max(1, _span("timeout_s", request.timeout_s))),
        retries=request.retries,
        priority=request.priority,
        environment=request.environment if recipe is None else fields.environment_name(recipe),
        secrets=tuple(sorted(request.secrets)),
        recipe=recipe,
        preload=_preload(request.preload),
        checkpoint=_checkpoint(request),
        checkpoint_every=_span("checkpoint_every_s", request.checkpoint_every_s),
        grace=_span("grace_s", request.grace_s),
        preemptible=request.preemptible,
        by=None if request.by is None else Instant(round(request.by.timestamp() * SECOND)),
        engine=Engine(request.engine),
        on_loss=OnLoss(request.on_loss),
        tolerance=None if request.compare == "hash" else float(request.compare),
        check_sha256=request.check or "",
        comparator_sha256=request.comparator or "",
    )
    if spec.inputs or spec.outputs:  # every other field has its own limit
        _check_weight(spec)
    return spec


def _check_effect(request: TaskRequest) -> None:
    """Refuse options that would have no effect, or that no runtime offers together."""
    if request.function is None and request.preload:
        raise Invalid(
            "'preload' applies to functions: a warm sandbox imports the modules before a call arrives; "
            "a command imports what it needs, so leave 'preload' out"
        )
    if request.function is not None and (request.inputs or request.outputs):
        name = "inputs" if request.inputs else "outputs"
        raise Invalid(
            f"'{name}' applies to commands; a function gets its data as arguments and returns its result. "
            f"Leave '{name}' out, or run a command"
        )
    if Tier(request.tier) is not Tier.VM:
        return
    image = request.recipe is not None and request.recipe.image
    for asked, what in (
        (request.vram is not None, "'vram'"),
        (image, "an image"),
    ):
        if asked:
            raise Invalid(
                f"'tier' is 'vm' together with {what}; a virtual machine gets whole GPUs and runs no images: "
                f"leave out one of the two, or use tier 'container'"
            )


def _check_gang(request: TaskRequest, command: tuple[str, ...]) -> None:
    nodes, engine = request.nodes, Engine(request.engine)
    if nodes == 1:
        if engine is not Engine.NONE:
            raise Invalid(
                f"'engine' is {engine.value!r} and 'nodes' is 1; an engine joins the nodes of a gang: ask for 2 nodes or "
                "more, or start it in your own command"
            )
        if OnLoss(request.on_loss) is not OnLoss.REFORM:
            raise Invalid(
                f"'on_loss' is {request.on_loss!r} and 'nodes' is 1; it applies to gangs only: ask for 2 nodes "
                "or more, or leave it out"
            )
        return
    if request.function is not None:
        raise Invalid(
            f"'nodes' is {nodes} and this is a function; a gang runs a command on every node: put the function into "
            "a script and run that"
        )
    if Tier(request.tier) is not Tier.CONTAINER:
        raise Invalid(
            f"'nodes' is {nodes} and 'tier' is {request.tier!r}; the members of a gang share a network, "
            "which only tier 'container' provides: leave 'tier' out"
        )
    program = command[0].rpartition("/")[2] if command else ""
    if engine is Engine.TORCHRUN and program in ("torchrun", "accelerate"):
        raise Invalid(
            f"the command begins with {program!r} and 'engine' is 'torchrun', which starts it a second time; give "
            "the program alone, like python train.py"
        )


def _check_weight(spec: TaskSpec) -> None:
    """Refuse a spec too large for a frame: it would disconnect every node it is granted to."""
    try:
        weight = weight_of(spec)
    except UnicodeEncodeError:
        raise Invalid(
            "the task contains a lone surrogate, which is not valid text; send valid UTF-8"
        ) from None
    if weight > MAX_SPEC_BYTES:
        raise _too_many_names(len(spec.inputs), len(spec.outputs))


def _too_many_names(inputs: int, outputs: int) -> TooLarge:
    return TooLarge(
        f"the names of {inputs} inputs and {outputs} outputs take more than {MAX_SPEC_BYTES} bytes, "
        "the limit of a task; put the files into one archive"
    )


def _default_name(command: tuple[str, ...]) -> str:
    return command[0].rstrip("/").rpartition("/")[2][:200] or "command" if command else "function"


def _recipe(request: TaskRequest) -> Recipe | None:
    given, function = request.recipe, request.function
    if given is None:
        kind = fields.environment_kind(request.environment)
        if kind in (fields.PIP_ENVIRONMENT, fields.IMAGE_ENVIRONMENT):
            raise Invalid(
                f"'environment' is {request.environment[:60]!r}; ask for packages or an image with 'recipe'"
            )
        return None
    if request.environment != fields.DEFAULT_ENVIRONMENT:
        raise Invalid(f"give 'recipe' or 'environment' ({request.environment[:60]!r}), not both")
    made = fields.recipe(given.python, tuple(given.packages), given.image or "")
    if function is None:
        return None if made == Recipe() else made
    if made.python is not None and made.python != function.python:
        raise Invalid(
            f"'recipe' wants Python {made.python} and the function was made with {function.python}; "
            f"call it from Python {made.python}, or leave out 'python'"
        )
    if made.image:
        return made
    # The function's Python version constrains placement already; the environment must be built for the same version.
    return Recipe(function.python, made.packages) if made.packages else None


def _preload(modules: list[str]) -> tuple[str, ...]:
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise Invalid(
                f"'preload' holds {module[:60]!r}; name modules, like torch or numpy.linalg"
            )
    return tuple(dict.fromkeys(modules))


def _checkpoint(request: TaskRequest) -> str:
    if request.checkpoint is None:
        return ""
    if request.function is not None:
        raise Invalid(
            "'checkpoint' applies to commands: a function has no directory to save; "
            "run it as a script, or leave 'checkpoint' out"
        )
    try:
        return fields.checked_path(request.checkpoint, directory=True).removesuffix("/") + "/"
    except Invalid as error:
        raise Invalid(f"'checkpoint': {error.detail}") from None


def _span(field: str, seconds: float) -> Span:
    return Span(round(_finite(field, seconds) * 1_000_000))


def _requirements(request: TaskRequest, recipe: Recipe | None) -> Requirements:
    gpu = request.gpu
    if isinstance(gpu, float):
        _finite("gpu", gpu)
    gpus = gpuspec.parse(gpu, request.vram)
    cpus = 1.0 if request.cpus is None else _finite("cpus", request.cpus)
    memory = _size("memory", request.memory)
    return Requirements(
        gpu=gpus,
        cpu_milli=max(1, round(cpus * 1000)),
        memory_bytes=memory,
        disk_bytes=_size("disk", request.disk),
        tier=Tier(request.tier),
        python=_python(request, recipe),
        network=Network(request.network),
        nodes=request.nodes,
        labels=fields.requested_labels(request.labels),
        max_price_microcredits=None
        if request.max_price is None
        else fields.parse_price(request.max_price),
        cpu_by_gpus=bool(gpus) and request.cpus is None,
        memory_by_gpus=bool(gpus) and memory is None,
        siblings=siblings_of(request),
    )


def _python(request: TaskRequest, recipe: Recipe | None) -> str | None:
    if recipe is not None and recipe.image:
        return None
    if request.function is not None:
        return request.function.python
    return None if recipe is None else recipe.python


def _finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise Invalid(f"'{field}' is {value}; give a finite number")
    return value


def _size(field: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = gpuspec.parse_bytes(text)
    except BadGpuSpec as error:
        problem = error.detail.partition("\n")[0].removeprefix("GPU requirement ")
        problem = problem.replace("any GPU", "any machine")
        raise Invalid(f"'{field}' is {problem}") from None
    if size <= 0:
        raise Invalid(f"'{field}' is {text[:40]!r}; give a size above 0, or leave it out")
    if size > MAX_BYTES:
        raise Unprocessable(f"'{field}' is {text[:40]!r}; no machine has more than 1 PB")
    return size


def _check_words(field: str, words: Iterable[str]) -> None:
    total = 0
    for word in words:
        if "\0" in word:
            raise Invalid(
                f"'{field}' contains a NUL character, which no program can receive; remove it"
            )
        total += len(word.encode()) + 1
    if total > MAX_WORDS_BYTES:
        raise Invalid(
            f"'{field}' has {total} bytes; at most {MAX_WORDS_BYTES} are allowed: use an input file"
        )


def _check_env(field: str, env: Mapping[str, str]) -> None:
    for name in env:
        if not name or "=" in name:
            raise Invalid(
                f"'{field}' has a variable named {name[:40]!r}; a name must not be empty or contain '='"
            )
    _check_words(field, [*env.keys(), *env.values()])


def _check_secrets(request: TaskRequest) -> None:
    """Errors name the secrets, never their values."""
    for name in request.secrets:
        if name in request.env:
            raise Invalid(f"'{name[:40]}' is in 'env' and in 'secrets'; leave it out of one")
    check_secret_values({name: value or "" for name, value in secrets_of(request).items()})


def check_secret_values(values: Mapping[str, str]) -> None:
    _check_env("secrets", values)


def secrets_of(request: TaskRequest) -> dict[str, str | None]:
    """Value of each secret; None: the stored one of this name."""
    return {
        name: None if secret is None else secret.get_secret_value()
        for name, secret in request.secrets.items()
    }


def _inputs(request: TaskRequest) -> tuple[InputFile, ...]:
    if (
        sum(len(item.path) for item in request.inputs) > MAX_SPEC_BYTES
    ):  # before each path is checked
        raise _too_many_names(len(request.inputs), len(request.outputs))
    seen: dict[str, str] = {}
    for item in request.inputs:
        fields.checked_path(item.path)
        _distinct("inputs", item.path, seen)
        if item.size_bytes > MAX_BYTES:
            raise Unprocessable(f"input '{item.path}' of {item.size_bytes} bytes; at most 1 PB")
    if len(seen) > 1:
        _no_file_is_a_folder(seen)
    return tuple(
        InputFile(item.path, item.sha256, item.size_bytes, item.executable)
        for item in request.inputs
    )


def _outputs(outputs: list[str]) -> tuple[str, ...]:
    seen: dict[str, str] = {}
    for path in outputs:
        fields.checked_path(path, directory=True)
        _distinct("outputs", path.removesuffix("/"), seen)
    return tuple(outputs)


def _distinct(field: str, path: str, seen: dict[str, str]) -> None:
    folded = fields.folded_path(path)
    if folded in seen:
        raise Invalid(
            f"'{field}' names '{path}' and '{seen[folded]}', which are the same file on case-insensitive machines; rename one"
        )
    seen[folded] = path


def _no_file_is_a_folder(seen: dict[str, str]) -> None:
    """Refuse a path that is a file and a folder. With NUL for '/', a folder's content sorts right behind its name."""
    ordered = sorted(folded.replace("/", "\0") for folded in seen)
    for above, below in pairwise(ordered):
        if below.startswith(above + "\0"):
            parent, path = (seen[name.replace("\0", "/")] for name in (above, below))
            raise Invalid(f"input '{parent}' is a file and also the folder of '{path}'; rename one")
