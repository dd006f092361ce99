"""The loss curve reads no text that the statistics were fitted to, wherever in a text that lies."""

from __future__ import annotations

import random
from array import array
from itertools import chain

import pytest

from kvreclaim import LLM
from kvreclaim.calibrate.calibration import read_documents
from kvreclaim.calibrate.curve import PROSE, curve_documents
from kvreclaim.calibrate.held_out import PIECE, read_pieces, unread, windows
from kvreclaim.calibrate.settings import Reading
from kvreclaim.engine.api.llm import FOR_CALIBRATION
from kvreclaim.errors import InvalidArgumentError


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("size", [PIECE, PIECE + 1, 100, 256])
@pytest.mark.parametrize("before", [0, 1, 77])
def test_what_was_read_is_cut_out(size, before) -> None:
    own, old, more = numbers(before, 1), numbers(size, 2), numbers(90, 3)
    found = unread([*own, *old, *more], read_pieces([old, numbers(50, 4)]))
    assert found == [part for part in (own, more) if part]
    assert unread(more, ()) == [more]
    assert unread(old, read_pieces([old])) == []


def test_windows_do_not_reach_over_what_is_left_out() -> None:
    assert windows([[1, 2, 3, 4, 5], [6], [7, 8]], 2) == [[1, 2], [3, 4], [7, 8]]


@pytest.mark.parametrize("max_tokens", [3000, 9000])
def test_documents_of_a_curve_hold_nothing_that_was_read(tiny_dir, max_tokens) -> None:
    """However much was read: statistics made with other settings than those of the curve, too."""
    llm = LLM(tiny_dir("llama"), device="cpu", **FOR_CALIBRATION)
    read = read_documents(llm.loaded, None, max_tokens=max_tokens, context=400)
    everything = read_documents(llm.loaded, None, max_tokens=10**9, context=400)
    new = array("q", list(chain.from_iterable(everything))[max_tokens:]).tobytes()
    reading = Reading(curve=(192,))
    documents = curve_documents(llm, None, reading, read_pieces(read))
    prose = [document for document in documents if document.content == PROSE]
    assert len(documents) == 2 * len(prose) == 2 * reading.curve_documents
    for document in prose:
        assert array("q", document.prompt + document.continuation).tobytes() in new
    with pytest.raises(InvalidArgumentError, match="documents of 320 tokens that calibration has not read"):
        curve_documents(llm, None, reading, read_pieces(everything))
    with pytest.raises(InvalidArgumentError, match="do not record which text they were fitted to"):
        curve_documents(llm, None, reading, None)
