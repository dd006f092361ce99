"""A slot file gives back only what was put into it, after any damage."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.prefix.index import BlockName
from kvreclaim.offload.store.jobs import JobOutcome

from .slot_files import chain, empty, open_slots, payload, size_for

NUM_SLOTS = 6
ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KVRECLAIM_TEST_KILLS", "10"))

WRITERS = """
import os, random, sys
from pathlib import Path
from tests.offload.slot_files import chain, open_slots, payload
keys = [key for first in range(6) for key in chain(6, first)]
for seed in sys.stdin:
    if (writer := os.fork()) == 0:
        file, pick = open_slots(Path(sys.argv[1]), 24), random.Random(int(seed))
        file.recover()
        print(os.getpid(), flush=True)
        while True:
            key = pick.choice(keys)
            file.write(pick.randrange(24), key, payload(key, 1))
    os.waitpid(writer, 0)
    print("killed", flush=True)
"""


def expected(written: dict[int, tuple[int, BlockName]]) -> dict[int, BlockName]:
    """Which slots can be hit after a start: (seq, key) by slot -> key by slot."""
    last = {key.key: (seq, slot) for slot, (seq, key) in sorted(written.items(), key=lambda item: item[1][0])}
    slots = {slot: written[slot][1] for _, slot in last.values()}
    uids = {key.uid for key in slots.values()}

    def is_reached(key: BlockName) -> bool:
        if key.depth == 0:
            return True
        parents = [other for other in slots.values() if other.uid == key.parent_uid]
        return key.parent_uid in uids and is_reached(parents[0])

    return {slot: key for slot, key in slots.items() if is_reached(key)}


KEYS = [key for first in range(2) for key in chain(3, first)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, NUM_SLOTS - 1), st.sampled_from(range(len(KEYS)))),
        st.tuples(st.just("torn"), st.integers(0, NUM_SLOTS - 1), st.integers(0, 9000)),
        st.tuples(st.just("restart"), st.booleans(), st.just(0)),
    ),
    max_size=30,
)


@given(steps=STEPS)
@settings(max_examples=60)
def test_a_file_is_like_a_dict(steps: list[tuple[str, int, int]]) -> None:
    with TemporaryDirectory() as directory:
        place = Path(directory) / "tier"
        file, model, seq = open_slots(place, NUM_SLOTS), dict[int, tuple[int, BlockName]](), 0
        file.recover()
        for what, slot, which in [*steps, ("restart", False, 0)]:
            if what == "write":
                seq += 1
                assert file.write(slot, KEYS[which], payload(KEYS[which], seq)) is JobOutcome.OK
                model[slot] = seq, KEYS[which]
            elif what == "torn":  # what a kill in the middle of a write leaves
                os.pwrite(file.index_fd, bytes(8), slot * file.layout.entry)
                os.pwrite(file.slots_fd, os.urandom(64), slot * file.layout.slot + min(which, 5000))
                if slot in model and min(which, 5000) < file.layout.header + 5000:
                    del model[slot]
            else:
                file.close()
                if slot:
                    next(place.rglob("slots.index")).unlink()
                file = open_slots(place, NUM_SLOTS)
                recovered = file.recover()
                found = {each.slot: each.record for each in recovered}
                assert found == expected(model)
                depths = [each.record.depth for each in recovered]
                assert depths == sorted(depths)
                seq = max((seq for seq, _ in model.values()), default=0)
            for at in range(NUM_SLOTS):
                for key in KEYS:
                    out = empty()
                    outcome = file.read(at, key, out)
                    assert (outcome is JobOutcome.OK) == (at in model and model[at][1] == key)
                    assert outcome is not JobOutcome.OK or out == payload(key, model[at][0])
        file.close()


def test_a_writer_is_killed_at_any_moment(tmp_path: Path) -> None:
    pick, most = random.Random(7), 0
    command = [sys.executable, "-c", WRITERS, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, text=True, bufsize=1) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for kill in range(KILLS):
            writers.stdin.write(f"{kill}\n")
            writer = int(writers.stdout.readline())
            with pytest.raises(InvalidArgumentError, match="other files in use"):
                open_slots(tmp_path, 24)
            time.sleep(pick.random() * 0.02)
            os.kill(writer, signal.SIGKILL)
            assert writers.stdout.readline() == "killed\n"
            most = max(most, records_after_a_kill(tmp_path))
    assert most, "nothing was ever written"


def records_after_a_kill(directory: Path) -> int:
    file = open_slots(directory, 24)
    found = file.recover()
    assert len({each.slot for each in found}) == len({each.record.key for each in found}) == len(found)
    for each in found:
        out = empty()
        assert file.read(each.slot, each.record, out) is JobOutcome.OK
        assert out == payload(each.record, 1)
    file.close()
    assert sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) <= size_for(24)
    return len(found)
