"""What a plain prompt needs of memory/: no file of a feature that is off runs."""

from __future__ import annotations

import sys
from pathlib import Path

import kvreclaim.memory
from kvreclaim.memory import MemoryManager

ROOM = Path(kvreclaim.memory.__file__).parent
OFF = {"pins.py", "residency.py", "groups/window.py", "windows.py"}


def files_of(work) -> set[str]:
    """Files of memory/ that run while `work` does."""
    found = set()

    def note(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOM):
            found.add(path.relative_to(ROOM).as_posix())

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_plain_prompt_runs_no_file_of_a_feature_that_is_off():
    memory = MemoryManager(8, 4)

    def serve():
        for seq_id in range(4):  # the later ones hit, and the pool is reused
            memory.admit(seq_id, memory.match_prefix(memory.keys([seq_id // 2] * 14)))
            while (length := memory.table(seq_id).logical_len) < 14:
                assert memory.can_grow(seq_id, 1)
                memory.grow(seq_id, 1)
                memory.commit(seq_id, 1)
                memory.release_copy_sources()
                assert memory.num_blocks(seq_id) == length // 4 + 1
            memory.free(seq_id)

    found = files_of(serve)
    assert {"manager.py", "groups/full.py", "pool.py"} <= found
    assert not found & OFF
