"""Stored responses, which clients read or continue."""

from __future__ import annotations

import logging
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError

logger = logging.getLogger(__name__)

WAIT_S = 10.0
"""Seconds to wait for another process that writes to the same file."""
TABLE = """
    CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, used INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
        input BLOB NOT NULL, response BLOB NOT NULL
    );
    CREATE INDEX IF NOT EXISTS responses_by_use ON responses (tenant, used, num_bytes);
"""
SETTINGS = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON;"
FORGET = """
    DELETE FROM responses WHERE id IN (
        SELECT id FROM (
            SELECT id, SUM(num_bytes) OVER newest AS total, ROW_NUMBER() OVER newest AS place
            FROM responses WHERE ? IN (tenant, '*') WINDOW newest AS (ORDER BY used DESC)
        ) WHERE total > ? OR place > ?
    )
"""
"""The least recently used responses beyond the limits, of one tenant or of all ('*')."""


class Kept(NamedTuple):
    """JSON of the response and of the items that it answers, including earlier turns."""

    input: bytes
    response: bytes


class ResponseStore:
    """Keeps the latest responses of each tenant, in memory or in a SQLite file. Thread-safe.

    A response contains all items that it answers, so it outlives the ones it continues. Each tenant has its
    own limits; responses of former tenants count against the sum of all limits.
    Raises: InvalidArgumentError if the file was not made by this store.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._most, self._most_bytes = config.max_stored_responses, config.max_stored_responses_bytes
        self._num_tenants = max(1, len(config.api_keys) + (config.operator_key is not None))
        self._lock = threading.Lock()
        self._db = _opened(config.responses_db)

    def put(self, tenant: str | None, response_id: str, kept: Kept) -> bool:
        """Store a response; the least recently used ones make room. Returns: False if it exceeds the limit by
        itself."""
        num_bytes = sum(map(len, kept))
        if num_bytes > self._most_bytes or not self._most:
            return False
        row = (response_id, tenant or "", num_bytes, *kept)
        try:
            with self._lock, self._db:
                self._db.execute(
                    "INSERT INTO responses (id, tenant, used, num_bytes, input, response) "
                    "SELECT ?, ?, COALESCE(MAX(used), 0) + 1, ?, ?, ? FROM responses",
                    row,
                )
                self._forget(tenant or "", 1)
                self._forget("*", self._num_tenants)
        except sqlite3.Error as error:  # the answer exists and reports that it is not stored
            logger.error("response %s could not be stored: %s", response_id, error)
            return False
        return True

    def get(self, tenant: str | None, response_id: str) -> Kept | None:
        """Return a response of this tenant and mark it as used; None: unknown id."""
        with self._reading():
            newest = "(SELECT MAX(used) + 1 FROM responses)"
            mine = "WHERE id = ? AND tenant = ?"
            given = (response_id, tenant or "")
            self._db.execute(f"UPDATE responses SET used = {newest} {mine}", given)
            found = self._db.execute(f"SELECT input, response FROM responses {mine}", given).fetchone()
        return None if found is None else Kept(*found)

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Returns: whether the response existed."""
        with self._reading():
            given = (response_id, tenant or "")
            done = self._db.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", given)
        self._truncate_log()
        return done.rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _truncate_log(self) -> None:
        """Checkpoint and empty the write-ahead log, which holds deleted texts until then."""
        with self._reading():
            is_busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            logger.warning("a deleted response stays in the log of responses_db: another process reads it")

    def _forget(self, tenant: str, times: int) -> None:
        self._db.execute(FORGET, (tenant, times * self._most_bytes, times * self._most))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises: ApiError 503 if the file cannot be read."""
        try:
            with self._lock, self._db:
                yield
        except sqlite3.Error as error:
            logger.error("the stored responses could not be read: %s", error)
            raise ApiError(503, "the stored responses cannot be read now; try again later.") from error


def _check_private(path: Path) -> None:
    """Create the file if it is missing. Raises: InvalidArgumentError if other users may open it."""
    path.touch(mode=0o600)
    mode = path.stat().st_mode
    require(
        not stat.S_ISREG(mode) or not mode & 0o077,
        f"responses_db is '{path}' with mode {mode & 0o777:o}, open to others; run `chmod 600` on it.",
        "responses_db",
    )


def _opened(path: str | None) -> sqlite3.Connection:
    try:
        if path is not None:
            _check_private(Path(path))
        where = ":memory:" if path is None else Path(path).absolute()
        database = sqlite3.connect(where, timeout=WAIT_S, check_same_thread=False)
        database.executescript(SETTINGS + TABLE)
        database.execute("SELECT id, tenant, used, num_bytes, input, response FROM responses LIMIT 0")
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(
            f"responses_db is {path!r}, which cannot be opened ({reason}); pass the path of a new file, or "
            "of one that kvreclaim made.",
            field="responses_db",
        ) from error
    return database
