"""The form of a new task: command or script, GPUs that are there, the quote while choosing, the same in the terminal."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import GpoolError, Invalid
from gpool.core.ids import TaskId, decode, encode
from gpool.core.model import GpuRequest, Requirements
from gpool.core.money.offers import OfferFilter
from gpool.core.permissions import Action
from gpool.core.specs.gpu import parse as parse_gpu
from gpool.server.actions.market import offers, quote
from gpool.server.actions.tasks import documents, outputs, query
from gpool.server.actions.tasks.repeated import WantedTasks
from gpool.server.actions.tasks.submit import submit
from gpool.server.api.callers import server_of
from gpool.server.identity.throttle import RouteClass
from gpool.server.overload.admission import LoadClass
from gpool.server.store.identity_values import Caller
from gpool.server.web.parts import part
from gpool.server.web.rendering import html, page, rendered
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import Form, form_of, validated, visitor
from gpool.wire.documents import TaskRequest

routes = PageRouter("pages")

SCRIPT = "script.py"
MOST_MODELS = 12
UNFINISHED = frozenset({400, 422})
"""Statuses of a form that is not filled in yet: no error of the page."""


@routes.page("/tasks/new", Action.TASK_QUOTE)
async def show_new_task(request: Request) -> Response:
    """Show the form of a new task, filled in like another one with `?like=`."""
    who = await visitor(request)
    like = request.query_params.get("like", "")
    fields: dict[str, str] = {}
    if like:
        view = await query.task(server_of(request), who, TaskId(decode("task", like)))
        old = documents.task(view)
        fields = {
            "command": shlex.join(old.command),
            "gpu": old.gpu or "",
            "name": old.name,
            "network": old.network,
            "outputs": " ".join(view.spec.outputs),
        }
    return await _form(request, who, fields)


async def _form(
    request: Request,
    who: Caller,
    fields: dict[str, str],
    error: GpoolError | None = None,
) -> Response:
    server = server_of(request)
    needs = Requirements(gpu=(GpuRequest(),), cpu_milli=0, memory_bytes=0)
    found = await part(offers.offers(server, who, needs, OfferFilter(), None, MOST_MODELS))
    return page(
        request,
        "new_task.html",
        200 if error is None else error.status,
        offers=_models(found.value.items if found.value else []),
        fields=fields,
        error=error,
        quote=None,
        equivalent=None,
    )


def _models(found: list[Any]) -> list[dict[str, Any]]:
    """Free GPUs by model, the cheapest price of each."""
    models: dict[str, dict[str, Any]] = {}
    for each in found:
        known = models.setdefault(
            each.model,
            {"model": each.model, "memory": each.memory_bytes, "free": 0, "gpus": 0, "price": None},
        )
        known["free"] += each.free
        known["gpus"] += each.gpus
        prices = [each.price_microcredits, *([] if known["price"] is None else [known["price"]])]
        known["price"] = min(prices)
    return list(models.values())


@routes.form("/tasks/new/quote", Action.TASK_QUOTE, rate=RouteClass.READ, load=LoadClass.EXPLAIN)
async def quote_new_task(request: Request) -> Response:
    """Estimate cost and start of the task in the form, without submitting it."""
    who, form = await visitor(request), await form_of(request)
    try:
        wanted = _request(form, "0" * 64)
        found = await quote.quote(server_of(request), who, wanted)
    except GpoolError as error:
        status = 200 if error.status in UNFINISHED else error.status
        return html(rendered("quote.html", quote=None, error=error, equivalent=None), status)
    return html(rendered("quote.html", quote=found, error=None, equivalent=equivalent(form)))


@routes.form("/tasks/new", Action.TASK_SUBMIT, rate=RouteClass.SUBMIT)
async def submit_new_task(request: Request) -> Response:
    """Submit the task of the form and show it."""
    who, form, server = await visitor(request), await form_of(request), server_of(request)
    script = form.raw("script").replace("\r\n", "\n").encode()
    try:
        sha256 = hashlib.sha256(script).hexdigest()
        wanted = _request(form, sha256)
        if script.strip():
            upload = outputs.ArtifactUpload(sha256, None, None, len(script))
            await outputs.put(server, who, upload, _once(script))
        accepted = await submit(server, who, WantedTasks(wanted), None)
    except GpoolError as error:
        fields = {name: form.raw(name) for name in form.fields}
        return await _form(request, who, fields, error)
    return see(f"/tasks/{encode('task', accepted.tasks[0])}")


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _request(form: Form, sha256: str) -> TaskRequest:
    script, command = form.raw("script").strip(), form.text("command").replace("\r\n", "\n")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise Invalid(f"the command cannot be read: {error}; close its quotes") from error
    if script and not words:
        words = ["python", SCRIPT]
    if not words:
        raise Invalid("type a command or a script")
    members: dict[str, Any] = {
        "command": words,
        "name": form.text("name") or (SCRIPT if script else None),
        "gpu": _gpu(form),
        "network": "egress" if form.is_set("network") else "none",
        "outputs": form.text("outputs").split(),
        "max_price": form.text("max_price") or None,
        "timeout_s": _hours(form.text("hours")) * 3600,
    }
    if script:
        size = len(form.raw("script").replace("\r\n", "\n").encode())
        members["inputs"] = [{"path": SCRIPT, "sha256": sha256, "size_bytes": size}]
    packages = form.text("packages").split()
    if packages:
        members["recipe"] = {"packages": packages}
    return validated(TaskRequest, members)


def _gpu(form: Form) -> str | None:
    wanted = form.text("gpu_other") or form.text("gpu")
    if not wanted or wanted == "none":
        return None
    parse_gpu(wanted)  # says what is wrong with it
    return wanted


def _hours(text: str) -> float:
    try:
        hours = float(text or 24)
    except ValueError:
        raise Invalid(f"{text[:20]!r} is not a number of hours") from None
    return hours


def equivalent(form: Form) -> dict[str, str]:
    """The same submission in the terminal and in Python."""
    options: list[str] = []
    for name, option in (("name", "--name"), ("max_price", "--max-price")):
        if form.text(name):
            options += [option, form.text(name)]
    gpu = _gpu(form)
    options += ["--gpu", gpu] if gpu else []
    options += ["--network", "egress"] if form.is_set("network") else []
    for package in form.text("packages").split():
        options += ["--pip", package]
    for path in form.text("outputs").split():
        options += ["--output", path]
    command = form.text("command") or f"python {SCRIPT}"
    words = shlex.split(command)
    return {
        "cli": f"{shlex.join(['gpool', 'run', *options])} -- {shlex.join(words)}",
        "python": f"gpool.run({words!r}{''.join(_keywords(form, gpu))})",
    }


def _keywords(form: Form, gpu: str | None) -> list[str]:
    found: list[tuple[str, object]] = [
        ("gpu", gpu),
        ("name", form.text("name")),
        ("max_price", form.text("max_price")),
        ("network", "egress" if form.is_set("network") else ""),
        ("pip", form.text("packages").split()),
        ("outputs", form.text("outputs").split()),
    ]
    return [f", {name}={value!r}" for name, value in found if value]
