"""A slot file gives back what was put into it, or says why not."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store import record
from kvreclaim.offload.store.directory import StoreDirectory
from kvreclaim.offload.store.jobs import JobOutcome
from kvreclaim.offload.store.slot_file import SlotFile

from .slot_files import (
    BLOCK_SIZE,
    LAYOUT,
    PAYLOAD,
    FailingIO,
    chain,
    child,
    empty,
    namespace,
    open_slots,
    payload,
    size_for,
)

ROOT = Path(__file__).parents[2]


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_header_byte_for_byte() -> None:
    key = child(child(None, 9, 9, 9, 9), 1, 2, 3, -4)
    header = record.RecordHeader(b"n" * 32, key, 5000, record.XXH3_128, b"c" * 16, 77, 1_700_000_000)
    raw = record.pack(header, record.header_bytes(BLOCK_SIZE))
    assert len(raw) == 4096
    assert raw[:8] == b"KVRT\x01\x00\x00\x00"
    assert raw[8:40] == b"n" * 32
    assert (raw[40:72], raw[72:104], raw[104:120], raw[120:136]) == (
        key.key, key.parent, key.uid, key.parent_uid,
    )  # fmt: skip
    assert raw[136:152] == bytes([1, 0, 0, 0, 4, 0, 0, 0, 0x88, 0x13, 0, 0, 0, 0, 0, 0])
    assert raw[152:160] == bytes([1, 0, 0, 0, 0, 0, 0, 0])
    assert raw[160:176] == b"c" * 16
    assert int.from_bytes(raw[176:184], "little") == 77
    assert int.from_bytes(raw[184:192], "little") == 1_700_000_000
    assert raw[192:224] == key.tokens
    assert not any(raw[224:4092])
    assert record.unpack(raw) == header


@pytest.mark.parametrize(("block_size", "pages"), [(1, 1), (487, 1), (488, 2), (999, 2), (1000, 3)])
def test_a_header_has_as_many_pages_as_its_tokens_need(block_size: int, pages: int) -> None:
    assert record.header_bytes(block_size) == pages * 4096


@pytest.mark.parametrize("offset", [4, 6])
def test_a_version_or_flag_of_later_days_is_a_miss(offset: int) -> None:
    key = child(None, 1, 2, 3, 4)
    header = record.RecordHeader(b"n" * 32, key, 5000, record.XXH3_128, b"c" * 16, 1, 1)
    raw = bytearray(record.pack(header, 4096))
    raw[offset] ^= 2
    raw[4092:] = record.CRC.pack(record.zlib.crc32(raw[:4092]))
    assert record.unpack(raw) is JobOutcome.VERSION


def test_every_flipped_byte_is_a_miss(tmp_path: Path) -> None:
    (key,) = chain(1)
    file = open_slots(tmp_path, 1)
    file.write(0, key, payload(key))
    total = LAYOUT.header + PAYLOAD
    reasons = set()
    for offset in sorted({i * (total - 1) // 63 for i in range(64)} | set(range(0, 232, 4))):
        (byte,) = os.pread(file.slots_fd, 1, offset)
        os.pwrite(file.slots_fd, bytes([byte ^ 0x10]), offset)
        outcome = file.read(0, key, empty())
        assert outcome.is_corrupt, f"byte {offset}: {outcome}"
        reasons.add(outcome)
        os.pwrite(file.slots_fd, bytes([byte]), offset)
    assert reasons == {JobOutcome.HEADER, JobOutcome.PAYLOAD}
    assert file.read(0, key, empty()) is JobOutcome.OK
    file.close()


def test_a_file_cut_at_any_page_gives_what_is_left(tmp_path: Path) -> None:
    keys = chain(4)
    file = open_slots(tmp_path, 4)
    for slot, key in enumerate(keys):
        file.write(slot, key, payload(key))
    length = os.fstat(file.slots_fd).st_size
    for cut in range(length - 4096, -1, -4096):
        os.ftruncate(file.slots_fd, cut)
        for slot, key in enumerate(keys):
            out = empty()
            outcome = file.read(slot, key, out)
            is_whole = slot * LAYOUT.slot + LAYOUT.header + PAYLOAD <= cut
            assert outcome is (JobOutcome.OK if is_whole else JobOutcome.SHORT)
            assert not is_whole or out == payload(key)
    file.close()


@pytest.mark.parametrize("damage", ["gone", "zeros", "noise", "cut"])
def test_records_are_found_without_their_index(tmp_path: Path, damage: str) -> None:
    keys = chain(5)
    file = open_slots(tmp_path)
    for slot, key in enumerate(keys):
        file.write(slot, key, payload(key))
    os.pwrite(file.slots_fd, b"?", 4 * LAYOUT.slot + LAYOUT.header + 100)
    file.close()
    (index,) = tmp_path.rglob("slots.index")
    size = index.stat().st_size
    if damage == "gone":
        index.unlink()
    elif damage == "cut":
        os.truncate(index, 100)
    else:
        index.write_bytes({"zeros": bytes(size), "noise": b"KVRT" * (size // 4)}[damage])
    for _ in range(2):
        again = open_slots(tmp_path)
        assert [each.record for each in again.recover()] == keys[:4]
        again.close()


def test_an_index_that_tells_of_another_record_leads_to_a_miss(tmp_path: Path) -> None:
    old, new = chain(1, 1)[0], chain(1, 2)[0]
    file = open_slots(tmp_path)
    file.write(0, old, payload(old))
    entry = os.pread(file.index_fd, LAYOUT.entry, 0)
    file.write(0, new, payload(new))
    os.pwrite(file.index_fd, entry, 0)
    file.close()
    again = open_slots(tmp_path)
    (found,) = again.recover()
    assert found.record == old
    assert again.read(0, old, empty()) is JobOutcome.OTHER
    again.close()


def test_colliding_keys_are_distinguished_by_uid(tmp_path: Path) -> None:
    same = b"k" * 32
    mine, other = child(None, 1, 2, 3, 4, key=same), child(None, 5, 6, 7, 8, key=same)
    below = child(mine, 0, 0, 0, 0, key=b"c" * 32)
    file = open_slots(tmp_path)
    for slot, key in enumerate([mine, below, other]):
        file.write(slot, key, payload(key))
    file.close()
    again = open_slots(tmp_path)
    assert [each.record for each in again.recover()] == [other]
    assert again.read(2, mine, empty()) is JobOutcome.OTHER
    assert again.read(1, child(other, 0, 0, 0, 0, key=b"c" * 32), empty()) is JobOutcome.OTHER
    again.close()


def test_another_namespace_reads_nothing(tmp_path: Path) -> None:
    (key,) = chain(1)
    file = open_slots(tmp_path / "a")
    file.write(0, key, payload(key))
    raw = os.pread(file.slots_fd, LAYOUT.slot, 0)
    file.close()
    other = open_slots(tmp_path / "b", weights_digest="another")
    os.pwrite(other.slots_fd, raw, 0)
    assert other.read(0, key, empty()) is JobOutcome.NAMESPACE
    other.close()


def test_an_unknown_checksum_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = chain(1)
    file = open_slots(tmp_path)
    monkeypatch.setattr(record, "XXH3_128", 9)
    file.write(0, key, payload(key))
    monkeypatch.undo()
    assert file.read(0, key, empty()) is JobOutcome.VERSION
    file.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_leaves_no_record(tmp_path: Path, code: int) -> None:
    (key,) = chain(1)
    io = FailingIO()
    file = open_slots(tmp_path, io=io)
    io.write_error = code
    outcome = file.write(0, key, payload(key))
    assert outcome is (JobOutcome.IO_ERROR if code == errno.EIO else JobOutcome.NO_SPACE)
    io.write_error, io.short = 0, 4000
    assert file.write(1, key, payload(key)) is JobOutcome.SHORT
    io.short, io.read_error = 0, errno.EIO
    assert file.read(0, key, empty()) is JobOutcome.IO_ERROR
    file.close()
    again = open_slots(tmp_path)
    assert again.recover() == []
    again.close()


def test_a_limit_for_files_stops_what_lies_behind_it(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from tests.offload.slot_files import LAYOUT, chain, open_slots, payload
from kvreclaim.errors import InvalidArgumentError
file, keys, place = open_slots(Path(sys.argv[1])), chain(2), Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * LAYOUT.slot + 4096,) * 2)
for slot, key in ((0, keys[0]), (5, keys[1]), (6, keys[1])):
    print(file.write(slot, key, payload(key)))
try:
    open_slots(place / "other")
except InvalidArgumentError as error:
    print("can't set aside" in str(error))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ok", "short", "no_space", "True"]
    again = open_slots(tmp_path)
    assert [each.record for each in again.recover()] == chain(2)[:1]
    again.close()


def test_all_is_forgotten(tmp_path: Path) -> None:
    (key,) = chain(1)
    file = open_slots(tmp_path)
    file.write(0, key, payload(key))
    assert file.clear() is JobOutcome.OK
    assert file.read(0, key, empty()) is JobOutcome.BLANK
    assert file.write(3, key, payload(key)) is JobOutcome.OK
    file.close()
    again = open_slots(tmp_path)
    assert [each.slot for each in again.recover()] == [3]
    again.close()
    assert bytes_in(tmp_path) == size_for(8)


def test_a_file_grows_and_shrinks_with_its_size(tmp_path: Path) -> None:
    keys = chain(4)
    file = open_slots(tmp_path, 4)
    for slot, key in enumerate(keys):
        file.write(slot, key, payload(key))
    file.close()
    for num_slots, left in ((9, 4), (2, 2), (3, 2)):
        again = open_slots(tmp_path, num_slots)
        assert again.num_slots == num_slots
        assert [each.record for each in again.recover()] == keys[:left]
        again.close()
        assert bytes_in(tmp_path) == size_for(num_slots)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    open_slots(directory).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_unsafe_places_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="written to by everybody"):
        open_slots(shared)
    inner = tmp_path / "inner" / namespace().hex
    inner.mkdir(parents=True)
    inner.chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="written to by everybody"):
        open_slots(tmp_path / "inner")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="can't be used"):
        open_slots(tmp_path / "file")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    place = tmp_path / "tier" / namespace().hex
    place.mkdir(parents=True)
    (place / "slots.kv").symlink_to(target)
    with pytest.raises(InvalidArgumentError, match=r"slots\.kv"):
        open_slots(tmp_path / "tier")
    assert target.read_text() == "precious"


@pytest.mark.parametrize("name", ["LOCK", "meta.json", "slots.kv", "slots.index"])
def test_a_file_with_another_name_or_for_others_is_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    target.chmod(0o600)
    folder = tmp_path / "tier" / namespace().hex
    folder.mkdir(0o700, parents=True)
    path = (folder.parent if name == "LOCK" else folder) / name
    path.hardlink_to(target)
    with pytest.raises(InvalidArgumentError, match="has 2 names"):
        open_slots(tmp_path / "tier")
    assert target.read_text() == "precious"
    path.unlink()
    path.touch(0o600)
    path.chmod(0o640)
    with pytest.raises(InvalidArgumentError, match="-rw-r-----"):
        open_slots(tmp_path / "tier")
    path.chmod(0o600)
    open_slots(tmp_path / "tier").close()


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_slots(tmp_path).close()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(InvalidArgumentError, match=f"belongs to user {user}"):
        open_slots(tmp_path)


def test_a_size_without_room_and_a_disk_without_space_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"a block takes {LAYOUT.slot + LAYOUT.entry} bytes"
    ) as error:
        SlotFile.open(tmp_path, namespace(), PAYLOAD, BLOCK_SIZE, size_for(1) - 1)
    assert error.value.field == "kv_offloading_disk_size"
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(InvalidArgumentError, match="can't set aside"):
        SlotFile.open(tmp_path, namespace(), PAYLOAD, BLOCK_SIZE, 2 * free + (1 << 30))
    io = FailingIO()
    io.allocate_error = errno.ENOSPC
    with pytest.raises(InvalidArgumentError, match="can't set aside"):
        open_slots(tmp_path, io=io)
    assert bytes_in(tmp_path) <= size_for(0)
    open_slots(tmp_path).close()


def test_a_second_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    keys = chain(2)
    first = open_slots(tmp_path, 4)
    first.write(0, keys[0], payload(keys[0]))
    with pytest.raises(InvalidArgumentError, match="other files in use"):
        open_slots(tmp_path, 4)
    second = open_slots(tmp_path, 10)
    assert second.num_slots == 6
    assert second.recover() == []
    second.write(0, keys[1], payload(keys[1]))
    out = empty()
    assert first.read(0, keys[0], out) is JobOutcome.OK
    assert out == payload(keys[0])
    assert bytes_in(tmp_path) <= size_for(10)
    first.close()
    again = open_slots(tmp_path, 10)
    assert [each.record for each in again.recover()] == [keys[0]]
    again.close()
    second.close()


def test_of_many_that_start_at_once_one_has_the_room(tmp_path: Path) -> None:
    opened: list[SlotFile] = []
    refused: list[str] = []

    def start() -> None:
        try:
            opened.append(open_slots(tmp_path))
        except InvalidArgumentError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(refused)) == (1, 5)
    assert opened[0].num_slots == 8
    assert bytes_in(tmp_path) == size_for(8)
    opened[0].close()


def test_a_directory_that_stays_locked_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreDirectory.__init__, "__defaults__", (0.0,))
    with StoreDirectory(tmp_path), pytest.raises(InvalidArgumentError, match="has been setting up"):
        open_slots(tmp_path)
    open_slots(tmp_path).close()


def test_old_files_make_way_for_new_ones(tmp_path: Path) -> None:
    def run(name: str, num_slots: int, used_at: int) -> int:
        file = open_slots(tmp_path, num_slots, kv_format=name)
        place = tmp_path / namespace(kv_format=name).hex
        os.utime(place / "slots.kv", (used_at, used_at))
        file.close()
        assert bytes_in(tmp_path) <= size_for(num_slots)
        return file.num_slots

    def left() -> set[str]:
        names = {namespace(kv_format=name).hex: name for name in ("aaaa", "bbbb", "cccc", "dddd")}
        return {names[path.name] for path in tmp_path.iterdir() if path.is_dir()}

    assert run("aaaa", 4, 1000) == 4
    assert run("bbbb", 25, 2000) == 20
    assert left() == {"aaaa", "bbbb"}
    assert run("cccc", 46, 3000) == 25
    assert left() == {"bbbb", "cccc"}
    (tmp_path / namespace(kv_format="cccc").hex / "slots.index").write_bytes(b"")
    assert run("dddd", 10, 4000) == 10
    assert left() == {"dddd"}


def test_a_file_in_use_is_not_removed(tmp_path: Path) -> None:
    first = open_slots(tmp_path, 4)
    open_slots(tmp_path, 7, weights_digest="diff").close()
    first.write(3, chain(1)[0], payload(chain(1)[0]))
    assert first.read(3, chain(1)[0], empty()) is JobOutcome.OK
    first.close()
    assert bytes_in(tmp_path) <= size_for(7)
