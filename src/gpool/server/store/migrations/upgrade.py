"""Migration to the newest schema: SQLite over its connection, PostgreSQL by SQL that the driver runs."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, create_engine
from sqlalchemy.pool import NullPool


def config() -> Config:
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return made


def upgrade_sqlite(path: Path, to: str = "head") -> None:
    engine = create_engine(URL.create("sqlite", database=str(path)), poolclass=NullPool)
    with engine.begin() as connection:
        made = config()
        made.attributes["connection"] = connection
        command.upgrade(made, to)
    engine.dispose()


def postgres_script(current: str | None, to: str = "head") -> str:
    made = config()
    made.output_buffer = StringIO()
    made.attributes["dialect"] = "postgresql"
    command.upgrade(made, f"{current or 'base'}:{to}", sql=True)
    return made.output_buffer.getvalue()
