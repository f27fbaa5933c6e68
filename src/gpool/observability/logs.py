"""The log of server and agent: structlog events and standard library records through one handler, as text for people
or as ECS JSON. Adds the fields of the work at hand and removes secrets. Configured once, by each `main`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict, Processor, WrappedLogger

from gpool.observability import ecs
from gpool.observability.context import current_fields
from gpool.observability.redaction import Redactor
from gpool.observability.tracing import NOT_INSTALLED, Tracing, open_tracing

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

FIELDS = "gpool_fields"
"""Attribute of a `logging.LogRecord` with the fields of a structlog event."""

MOST_LOGGED = 100
"""Ids named in one line; `count` has the number of all."""

_LEAST: dict[str, int] = {
    "alembic.runtime.plugins": logging.WARNING,  # a line per plugin
    "asyncio": logging.INFO,
    "docker": logging.INFO,
    "urllib3": logging.INFO,
    "httpcore": logging.INFO,
    "httpx2": logging.WARNING,  # a line per request
    "uvicorn": logging.INFO,
    "websockets": logging.INFO,
}
"""Lowest level of libraries, also at level `debug`: their details hold frames and headers."""

_encode = msgspec.json.Encoder(enc_hook=str).encode


def to_record(
    logger: WrappedLogger,  # noqa: ARG001 - the signature of processors
    name: str,  # noqa: ARG001
    event: EventDict,
) -> tuple[tuple[str], dict[str, Any]]:
    """Pass an event on as a record: its text is the message, the fields are beside it."""
    exception, stack = event.pop("exc_info", None), event.pop("stack_info", False)
    text = str(event.pop("event", ""))
    return (text,), {"exc_info": exception, "stack_info": stack, "extra": {FIELDS: event}}


PROCESSORS: tuple[Processor, ...] = (structlog.stdlib.filter_by_level, to_record)


def get_logger(name: str) -> BoundLogger:
    """Logger of structlog above the standard library's, configured or not."""
    logger: BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=PROCESSORS,
        wrapper_class=BoundLogger,
        cache_logger_on_first_use=True,
    )
    return logger


@dataclass(frozen=True, slots=True)
class LogSource:
    """The process that writes the log."""

    service: str
    version: str
    pid: int = field(default_factory=os.getpid)

    @property
    def dataset(self) -> str:
        return self.service.replace("-", ".")


class EcsFormatter(logging.Formatter):
    """One JSON object a line, with the fields of `ecs`."""

    def __init__(self, source: LogSource, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor
        self._fixed = {
            "log.logger": "",  # third: the order in which people read them
            "ecs.version": ecs.ECS_VERSION,
            "service.name": source.service,
            "service.version": source.version,
            "event.dataset": source.dataset,
            "process.pid": source.pid,
        }

    def format(self, record: logging.LogRecord) -> str:
        redact = self._redactor
        document: dict[str, object] = {
            "@timestamp": ecs.timestamp(record.created),
            "log.level": record.levelname.lower(),
            "message": redact.text(ecs.clean(message_of(record)[: ecs.LONGEST_TEXT])),
            **self._fixed,
            "log.logger": record.name,
        }
        for name, value in fields_of(record).items():
            ecs.put(document, name, redact.value(name, value))
        exception = exception_of(record)
        if exception is not None:
            document["error.type"] = type(exception).__qualname__
            document["error.message"] = self._long(str(exception))
            document["error.stack_trace"] = self._long(stack_of(exception))
        elif record.stack_info:
            document["error.stack_trace"] = self._long(record.stack_info)
        return _encode(document).decode()

    def _long(self, text: str) -> str:
        """Keep the end of a long trace, where the error is."""
        return self._redactor.text(ecs.clean(text[-ecs.LONGEST_TEXT :]))


class TextFormatter(logging.Formatter):
    """Lines for people, in colour on a terminal; a traceback has several."""

    def __init__(self, redactor: Redactor, *, colors: bool) -> None:
        super().__init__()
        self._redactor = redactor
        self._render = ConsoleRenderer(
            colors=colors, pad_event_to=0, sort_keys=False, exception_formatter=plain_traceback
        )

    def format(self, record: logging.LogRecord) -> str:
        redact = self._redactor
        event: EventDict = {
            "timestamp": ecs.timestamp(record.created),
            "level": record.levelname.lower(),
            "event": _printable(redact.text(message_of(record))),
            "logger": record.name,
        }
        for name, value in fields_of(record).items():
            if value is not None:
                event[name] = redact.value(name, value)
        exception = exception_of(record)
        if exception is not None:
            event["exception"] = redact.text(stack_of(exception))
        elif record.stack_info:
            event["stack"] = redact.text(record.stack_info)
        return ecs.clean(str(self._render(None, "", event)))


def message_of(record: logging.LogRecord) -> str:
    """Text of a record; a record whose arguments do not fit its text keeps the text."""
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args!r}"


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Fields of the work at hand and of the event; those of the event win."""
    return {**current_fields(), **getattr(record, FIELDS, {})}


def exception_of(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def stack_of(exception: BaseException) -> str:
    return "".join(traceback.format_exception(exception)).rstrip("\n")


def _printable(text: str) -> str:
    """Text without terminal control characters; it may come from a node."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def log_handler(
    form: LogFormat, source: LogSource, redactor: Redactor, stream: TextIO | None = None
) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    if form == "json":
        handler.setFormatter(EcsFormatter(source, redactor))
    else:
        handler.setFormatter(TextFormatter(redactor, colors=handler.stream.isatty()))
    return handler


def configure(
    form: LogFormat, level: LogLevel, source: LogSource, redactor: Redactor | None = None
) -> Redactor:
    """Send every log line, warning and uncaught exception of this process to standard error; return the redactor."""
    redactor = Redactor() if redactor is None else redactor
    logging.raiseExceptions = (
        False  # a line that cannot be written must not print a traceback instead
    )
    root = logging.getLogger()
    root.handlers[:] = [log_handler(form, source, redactor)]
    root.setLevel(level.upper())
    for name, least in _LEAST.items():
        logging.getLogger(name).setLevel(max(least, root.level))
    logging.captureWarnings(True)
    structlog.configure(
        processors=PROCESSORS,
        wrapper_class=BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    _catch_uncaught()
    return redactor


def _catch_uncaught() -> None:
    log = logging.getLogger("gpool.uncaught")

    def of_process(
        kind: type[BaseException], error: BaseException, at: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, at)
        else:
            log.critical("uncaught exception", exc_info=error)

    def of_thread(uncaught: threading.ExceptHookArgs) -> None:
        name = "" if uncaught.thread is None else uncaught.thread.name
        log.critical("uncaught exception in thread %s", name, exc_info=uncaught.exc_value)

    def unraisable(uncaught: Any) -> None:
        text = uncaught.err_msg or "exception ignored"
        log.error("%s", text, exc_info=uncaught.exc_value)

    sys.excepthook = of_process
    threading.excepthook = of_thread
    sys.unraisablehook = unraisable


@contextmanager
def exported_traces(source: LogSource, redactor: Redactor) -> Iterator[Tracing | None]:
    """Traces of this process while the block runs; None with a warning if OpenTelemetry is missing."""
    try:
        tracing = open_tracing(source.service, source.version, redactor)
    except ImportError:
        logging.getLogger(__name__).warning(NOT_INSTALLED)
        tracing = None
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def write_line(form: str, source: LogSource, level: int, text: str) -> None:
    """Write one line of a process that has not configured its log."""
    if form != "json":
        sys.stderr.write(f"{text}\n")
        return
    record = logging.LogRecord("gpool", level, "", 0, text, None, None)
    log_handler("json", source, Redactor()).emit(record)


def fail(form: str, source: LogSource, text: str) -> None:
    """Write the error that ends the process: `gpool: …` for people, a critical event for programs."""
    prefix = "" if form == "json" else "gpool: "
    write_line(form, source, logging.CRITICAL, prefix + text)
