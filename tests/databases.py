"""A private PostgreSQL for tests: one cluster in a temporary directory, on a Unix socket, a database a test.

PostgreSQL refuses to run as root, so there its programs run as the user `postgres` of its package, or as
`nobody`. Without PostgreSQL, or psycopg, tests are skipped, except where `CI` is true.
"""

import atexit
import functools
import os
import pwd
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.durable.places import is_database
from holdfast.engine.durable.store import Store

__all__ = [
    "STORES",
    "Cluster",
    "forbid_writing",
    "new_place",
    "programs",
    "run_sql",
    "shared_cluster",
    "start_cluster",
]

STORES = ("sqlite", "postgres")

SETTINGS = {
    "max_connections": "40",
    "shared_buffers": "16MB",
    "autovacuum": "off",
    "log_min_messages": "fatal",
    "fsync": "off",  # Tests kill processes, not the machine.
    "full_page_writes": "off",
    "deadlock_timeout": "100ms",
}


def programs() -> Path | None:
    """The directory of PostgreSQL's programs."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent  # A link to it need not have the other programs beside it.
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: path.parts[4])
    return installed[-1].parent if installed else None


class Cluster:
    """A running PostgreSQL that can be stopped, killed and started."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self.binaries = binaries
        self.directory = directory
        self.data = directory / "data"
        self._user = _user()
        self._made = 0
        if self._user is not None:
            shutil.chown(directory, self._user)
        directory.chmod(0o755)
        self._run(
            "initdb", "--no-sync", "--auth=trust", "--username=holdfast", "--encoding=UTF8", "--locale=C"
        )
        self.start()
        self.sql("postgres", "CREATE DATABASE empty")

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.binaries / program), "-D", str(self.data), *arguments],
            user=self._user,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == 0, done.stdout.decode()

    def start(self) -> None:
        """Start, and return when it accepts connections."""
        stated = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        options = f"-k {self.directory} -h '' {stated}"
        log = self.directory / "log"
        self._run("pg_ctl", "-w", "-t", "120", "-s", "-l", str(log), "-o", options, "start")

    def stop(self) -> None:
        """Stop it: open connections are ended, nothing is lost."""
        self._run("pg_ctl", "-w", "-t", "120", "-s", "-m", "fast", "stop")

    def kill(self) -> None:
        """Kill all of its processes, without a word before, and return when they are gone."""
        first = int((self.data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        processes = [first, *map(int, children)]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        while any(_runs(process) for process in processes):
            time.sleep(0.01)
        # Where nobody waits for orphans, they stay in the table of processes and seem to run.
        for file in (self.data / "postmaster.pid", *self.directory.glob(".s.PGSQL.*")):
            file.unlink()

    def remove(self) -> None:
        """Stop it and remove its files."""
        if (self.data / "postmaster.pid").exists():
            self._run("pg_ctl", "-w", "-t", "120", "-s", "-m", "immediate", "stop")
        shutil.rmtree(self.directory)

    def url(self, database: str, **parameters: str) -> str:
        """The URL of a database."""
        given = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"postgresql://holdfast@/{database}?host={self.directory}{given}"

    def sql(self, database: str, statement: str) -> None:
        """Run a statement outside a transaction, as those about whole databases must."""
        with import_module("psycopg").connect(self.url(database), autocommit=True) as connection:
            connection.execute(statement)

    def new_database(self) -> str:
        """An empty database of its own."""
        self._made += 1
        name = f"test_{os.getpid()}_{self._made}"
        self.sql("postgres", f"CREATE DATABASE {name} TEMPLATE empty")
        return name


def _runs(process: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _user() -> str | None:
    """The user that runs PostgreSQL; None for that of this process."""
    if os.getuid() != 0:
        return None
    known = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def start_cluster() -> Cluster:
    """A cluster; the caller stops it and removes its directory."""
    binaries = programs()
    missing = "PostgreSQL" if binaries is None else None if find_spec("psycopg") else "psycopg"
    if missing is not None or binaries is None:
        assert os.environ.get("CI") != "true", f"continuous integration installs {missing}: .ci/run"
        pytest.skip(f"there is no {missing} on this machine")
    # A short path: the name of a Unix socket has at most 107 bytes.
    return Cluster(binaries, Path(tempfile.mkdtemp(prefix="holdfast-pg-")))


@functools.cache
def shared_cluster() -> Cluster:
    """The cluster of all tests of this process that do not stop it."""
    started = start_cluster()
    atexit.register(started.remove)
    return started


def new_place(kind: str, path: Path) -> str:
    """The place of a new journal: a file `path`, or a database in the shared cluster."""
    return str(path) if kind == "sqlite" else shared_cluster().url(shared_cluster().new_database())


REFUSED = "BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE"
REFUSAL = """
CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN RAISE EXCEPTION 'nothing may be written' USING ERRCODE = 'read_only_sql_transaction'; END$$
"""


def forbid_writing(store: Store, forbidden: bool) -> None:
    """Let nothing be written to a journal, or everything again, whatever its thread does meanwhile."""
    kept: Any = store
    if not is_database(kept.place):
        kept._connection.execute(f"PRAGMA query_only = {'ON' if forbidden else 'OFF'}")
        return
    # A setting of the journal's connection is undone when its thread rolls a transaction back.
    with import_module("psycopg").connect(kept._link._url, autocommit=True) as connection:
        connection.execute(REFUSAL)
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast'"
        ).fetchall()
        for (table,) in tables:
            connection.execute(f"DROP TRIGGER IF EXISTS refused ON holdfast.{table}")
            if forbidden:
                connection.execute(
                    f"CREATE TRIGGER refused {REFUSED} ON holdfast.{table} EXECUTE FUNCTION refuse()"
                )


def run_sql(place: str, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement on a journal, past everything that guards it."""
    if not is_database(place):
        with closing(sqlite3.connect(place)) as connection, connection:
            return connection.execute(statement).fetchall()
    psycopg = import_module("psycopg")
    with psycopg.connect(place, options="-c search_path=holdfast") as connection:
        cursor = connection.execute(re.sub(r"x'([0-9a-f]*)'", r"'\\x\1'::bytea", statement))
        found: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        return found
