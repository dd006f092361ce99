"""Where responses are kept: limits, tenants, a file that outlives the server."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import web
from responding import ask, post
from running import running_server
from speaking import biased

from kvreclaim import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.responses.store import Kept, ResponseStore

TEMPLATE = "{% for m in messages %} {{ m.content }}{% endfor %}"
ONE = Kept(b"[]", b"12345678")
"""Ten bytes."""


def store(**options: Any) -> ResponseStore:
    return ResponseStore(ServerConfig(served_model_name=("m",), **options))


def ids(kept: ResponseStore, tenant: str | None, number: int) -> list[int]:
    """Stored ids below `number`; reading them here is no use of them."""
    found = kept._db.execute("SELECT id FROM responses WHERE tenant = ?", (tenant or "",)).fetchall()
    return [at for at in range(number) if (str(at),) in found]


def test_the_least_recently_used_go_first() -> None:
    kept = store(max_stored_responses=3)
    for at in range(3):
        assert kept.put(None, str(at), ONE)
    assert kept.get(None, "0") == ONE
    assert kept.put(None, "3", ONE)
    assert ids(kept, None, 4) == [0, 2, 3]
    assert kept.get(None, "1") is None


def test_bytes_are_limited_too_and_what_is_larger_is_not_kept() -> None:
    kept = store(max_stored_responses_bytes=35)
    for at in range(5):
        assert kept.put(None, str(at), ONE)
    assert ids(kept, None, 5) == [2, 3, 4]
    assert kept.put(None, "5", Kept(b"x" * 35, b""))
    assert not kept.put(None, "6", Kept(b"x" * 35, b"y"))
    assert ids(kept, None, 7) == [5]
    assert not store(max_stored_responses=0).put(None, "0", ONE)


def test_a_tenant_has_its_own_limits_and_sees_its_own_only() -> None:
    kept = store(max_stored_responses=2, api_keys=("a", "b"))
    for at in range(4):
        kept.put("one", str(at), ONE)
    kept.put("two", "4", ONE)
    assert ids(kept, "one", 5) == [2, 3]
    assert ids(kept, "two", 5) == [4]
    assert kept.get("two", "3") is None
    assert not kept.delete("two", "3")
    assert kept.get("one", "3") == ONE
    assert kept.delete("one", "3")
    assert not kept.delete("one", "3")


def test_tenants_that_are_no_more_make_room(tmp_path: Path) -> None:
    """A file never holds more than the tenants of its server may keep together."""
    path = str(tmp_path / "responses.db")
    for tenant in ("old", "new"):
        kept = store(max_stored_responses=2, responses_db=path)
        for at in range(2):
            kept.put(tenant, f"{tenant}{at}", ONE)
        kept.close()
    with sqlite3.connect(path) as database:
        assert sorted(database.execute("SELECT id FROM responses")) == [("new0",), ("new1",)]


def test_a_file_is_its_owners_alone_and_must_be_ours(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store(responses_db=str(path)).close()
    assert path.stat().st_mode & 0o077 == 0
    other = tmp_path / "other"
    other.write_text("no database " * 100)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE responses (name TEXT)")
    other.chmod(0o600)
    foreign.chmod(0o600)
    for wrong in (other, foreign, tmp_path, tmp_path / "missing" / "a.db"):
        with pytest.raises(InvalidArgumentError, match="cannot be opened"):
            store(responses_db=str(wrong))


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    path.touch()
    path.chmod(0o640)
    with pytest.raises(InvalidArgumentError, match="mode 640"):
        store(responses_db=str(path))
    path.chmod(0o600)
    store(responses_db=str(path)).close()
    with pytest.raises(InvalidArgumentError, match="responses_db is empty"):
        store(responses_db="")


def test_a_deleted_response_is_in_no_file(tmp_path: Path) -> None:
    """Neither in the database nor in its log, while the server runs on."""
    kept = store(responses_db=str(tmp_path / "responses.db"))
    secret = b"a text that was deleted " * 500

    def has_secret() -> bool:
        return any(secret[:24] in file.read_bytes() for file in tmp_path.iterdir())

    assert kept.put(None, "0", Kept(b"[]", secret))
    assert kept.put(None, "1", ONE)
    assert has_secret()
    assert kept.delete(None, "0")
    assert not has_secret()
    assert kept.get(None, "1") == ONE
    kept.close()


def test_what_cannot_be_written_is_not_kept_and_what_cannot_be_read_is_a_503() -> None:
    kept = store()
    kept.close()
    assert not kept.put(None, "0", ONE)
    with pytest.raises(ApiError) as caught:
        kept.get(None, "0")
    assert caught.value.status == 503


def test_keys_a_restart_and_a_response_that_is_too_large(speaker_dir: Path, tmp_path: Path) -> None:
    options = {"api_keys": ("one", "two"), "tenant_secret": "s" * 32, "max_stored_responses_bytes": 6000}
    options["responses_db"] = str(tmp_path / "responses.db")
    with running_server(LLM(speaker_dir, num_blocks=64), **options) as server:
        first = ask(server, "one", input="w20", **biased("me"))
        large = ask(server, "one", input="w20", metadata={"a": "b" * 5000}, **biased("me"))
        assert (first["store"], large["store"]) == (True, False)
    with running_server(LLM(speaker_dir, num_blocks=64), **options) as server:
        address = f"{server.base_url}/v1/responses/"
        for key, name, status in (("one", "first", 200), ("two", "first", 404), ("one", "large", 404)):
            headers = {"authorization": f"Bearer {key}"}
            found = {"first": first, "large": large}[name]["id"]
            assert web.get(address + found, headers=headers).status_code == status
        body = {"input": "w21", "previous_response_id": first["id"], **biased("look.")}
        assert post(server, body, "two").json()["error"]["code"] == "previous_response_not_found"
        second = ask(server, "one", **body)
        page = web.get(f"{address}{second['id']}/input_items", headers={"authorization": "Bearer one"}).json()
        assert len(page["data"]) == 3
