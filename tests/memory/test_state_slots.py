"""Slots of recurrent states: against plain lists, and those of parked sequences."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from random import Random

import pytest

from kvreclaim.memory.groups.state_slots import StateSizes, StateSlots
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.offload.plan.tiered_offload import TieredOffload


def parked(num_slots: int = 4) -> MemoryManager:
    """One sequence that has computed ten tokens, and is about to compute another one when it is parked."""
    offload = partial(TieredOffload, num_host_slots=8)
    memory = MemoryManager(8, 4, states=StateSizes(num_slots), offload=offload)
    memory.admit(1, memory.match_prefix(memory.keys(list(range(11)))))
    memory.grow(1, 10)
    memory.commit(1, 10)
    memory.grow(1, 1)
    assert memory.offload.parking.park(1)
    return memory


def resume(memory: MemoryManager) -> None:
    parking = memory.offload.parking
    parking.resume(1, parking.match_parked(1))


def test_a_slot_is_held_until_its_state_is_saved():
    memory = parked()
    states = memory.recurrent
    assert states.num_used == 1
    memory.check()
    states.saved(1)
    assert states.num_used == 0
    resume(memory)
    assert states.coming(1) == states.slot(1)
    states.loaded(1)
    assert states.coming(1) is None
    memory.check()


def test_one_that_comes_back_in_the_step_in_which_it_left_has_its_slot_still():
    memory = parked()
    states = memory.recurrent
    slot = states.leaving(1)
    resume(memory)
    memory.grow(1, 1)
    assert states.slot(1) == slot
    assert states.leaving(1) is states.coming(1) is None
    assert len(states.pending(1)) == 1
    memory.check()


def test_one_that_leaves_in_the_step_in_which_it_came_back_takes_no_slot():
    memory = parked()
    states = memory.recurrent
    states.saved(1)
    resume(memory)
    memory.grow(1, 1)
    assert memory.offload.parking.park(1)
    assert states.leaving(1) is None
    assert states.num_used == 0
    memory.check()


@pytest.mark.parametrize(("is_saved", "comes_back"), list(product((False, True), repeat=2)))
def test_nothing_is_left_of_one_that_ends(is_saved, comes_back):
    memory = parked()
    if is_saved:
        memory.recurrent.saved(1)
    if comes_back:
        resume(memory)
        memory.free(1)
    else:
        memory.offload.parking.drop_parked(1)
    assert memory.recurrent.num_used == 0
    memory.admit(1, memory.match_prefix(memory.keys(list(range(11)))))
    assert memory.recurrent.coming(1) is memory.recurrent.slot(1) is None
    memory.free(1)
    memory.check()


@pytest.mark.parametrize(("num_slots", "max_kept"), [(0, None), (1, None), (5, None), (5, 2), (5, 0)])
def test_slots_against_plain_lists(num_slots, max_kept):
    """Kept states that can't be found are evicted first, then the least recently used; a slot with other
    references is not taken."""
    random, live, held, kept = Random(num_slots), set("abcdef"), [], {}
    slots = StateSlots(num_slots, max_kept, live.__contains__)
    most = num_slots if max_kept is None else max_kept

    def evict(keys):
        if keys:
            del kept[min(keys, key=lambda key: (key in live, list(kept).index(key)))]

    for _ in range(600):
        refs, key = Counter([*held, *kept.values()]), random.choice("abcdef")
        match random.choice(("take", "share", "release", "keep", "use", "drop", "live")):
            case "take":
                if len(refs) == num_slots:
                    evict([each for each, slot in kept.items() if refs[slot] == 1])
                slot = slots.take()
                assert (slot is None) == (len({*held, *kept.values()}) == num_slots)
                assert slot not in {*held, *kept.values()}
                held += [] if slot is None else [slot]
            case "share" if held:
                held.append(slots.share(random.choice(held)))
            case "release" if held:
                slots.release(held.pop(random.randrange(len(held))))
            case "keep" if held:
                slot, fits = held.pop(), key not in kept and most > 0
                assert slots.keep(key, slot) == fits
                if fits:
                    evict(list(kept) if len(kept) == most else [])
                    kept[key] = slot
            case "use" if key in kept:
                kept[key] = kept.pop(key)
                assert slots.use(key) == kept[key]
            case "drop":
                kept.pop(key, None)
                slots.drop(key)
            case "live":
                live ^= {key}
        slots.check(held)
        assert {each: slots.find(each) for each in "abcdef" if each in slots} == kept
        assert slots.num_live == len(kept.keys() & live)
        assert slots.num_free == num_slots - len({*held, *kept.values()})
