"""Signals of sequences with policies that need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.compression.compressor import Compressor, needs_of
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.engine.signals.late import LateRows, LateSignals
from kvreclaim.engine.signals.needs import is_watched, signal_bytes, window_of
from kvreclaim.engine.signals.observer import Observer, QueryWrite, StepMass, as_last, score_write
from kvreclaim.engine.signals.slot_scores import SlotScores, score_bytes
from kvreclaim.engine.signals.store import ByteBudget, DigestStore, MassStore, QueryStore
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.capture import capture_queries, read_again
from kvreclaim.model.inputs import hand_out_inputs
from kvreclaim.model.loader import LoadedModel
from kvreclaim.model.projection import output_projections
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.key_source import KeySource
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.states import StateStep


class ExtraPasses:
    """Results of extra passes for each layer, kept until the sequence is dropped.

    states: for recurrent layers: sequence id -> a pass from its state that stores no state
    """

    def __init__(
        self,
        loaded: LoadedModel,
        facts: ModelFacts,
        room: ByteBudget,
        states: Callable[[int], StateStep] | None,
    ) -> None:
        self.loaded, self.facts, self._room, self._states = loaded, facts, room, states
        self.kept: dict[int, dict[Signal, list[Tensor]]] = {}

    def future_queries(self, seq: Sequence) -> list[Tensor]:
        """[H, T - 1, D] of the whole text under full attention, in the model's dtype. The last token is never
        computed, so it has no query."""
        kept = self.kept.setdefault(seq.seq_id, {})
        if Signal.FUTURE_QUERIES not in kept:
            found: list[Tensor] = []
            dtype = self.loaded.facts.dtype
            capture_queries(
                self.loaded,
                [seq.token_ids[:-1]],
                lambda _, queries: found.append(queries.to(dtype)),
                rotated=True,
            )
            kept[Signal.FUTURE_QUERIES] = self._counted([found[layer] for layer in self.facts.ids])
        return kept[Signal.FUTURE_QUERIES]

    def read_again(self, seq: Sequence, source: Callable[[int], KeySource]) -> list[Tensor]:
        """[K, T] fp32 (capture.read_again). source: layer -> the sequence's keys and values"""
        kept = self.kept.setdefault(seq.seq_id, {})
        if Signal.READ_AGAIN not in kept:
            context = seq.token_ids[: seq.num_computed]
            states = None if self._states is None else self._states(seq.seq_id)
            found = read_again(self.loaded, context, lambda layer: source(layer).tensors(), states)
            kept[Signal.READ_AGAIN] = self._counted(found)
        return kept[Signal.READ_AGAIN]

    def _counted(self, found: list[Tensor]) -> list[Tensor]:
        self._room.change(0, sum(tensor.nbytes for tensor in found))
        return found

    def drop(self, seq_id: int) -> None:
        dropped = self.kept.pop(seq_id, {}).values()
        self._room.change(sum(tensor.nbytes for found in dropped for tensor in found), 0)


@dataclass(frozen=True, slots=True, eq=False)
class ParkedSignals:
    """Signals of one parked sequence, on the host. queries: by window; mass: [L, K, slots]; None where it has
    none."""

    queries: dict[int, tuple[int, Tensor]]
    mass: Tensor | None


@dataclass(frozen=True, eq=False)
class PassSignals:
    """Signals of one sequence at a compression (Signals.of_pass); what layers have in common is made once."""

    signals: Signals
    seq: Sequence
    num_slots: int
    block_ids: Tensor
    source: Callable[[int], KeySource]

    @cached_property
    def positions(self) -> Tensor:
        """[L, K, num_slots] int32."""
        return self.signals.positions(self.seq, self.num_slots)

    @cached_property
    def queries(self) -> Tensor:
        """[L, H, n, D]"""
        return self.signals.queries_of(self.seq)

    @cached_property
    def token_scores(self) -> Tensor:
        """[L, K, num_slots] fp32"""
        assert self.signals.scores is not None, "Signals.check has made them"
        return self.signals.scores.of_layers(self.block_ids, self.num_slots)

    def of(self, layer: int) -> LayerSignals:
        """Return the signals of one layer that the policy needs; neither positions nor scores where each head
        has slots of its own."""
        seq, compressor = self.seq, self.seq.request.compressor
        needs = needs_of(compressor)
        if compressor is None or not needs:
            return LayerSignals()
        own, found = self.signals, LayerSignals()
        if Signal.ATTENTION_MASS in needs:
            found = replace(found, mass=own.mass(seq, layer, self.num_slots))
        if Signal.POSITIONS in needs and not compressor.eviction_method.uneven:
            found = replace(found, positions=self.positions[layer])
        if Signal.RECENT_QUERIES in needs:
            found = replace(found, queries=self.queries[layer])
        if Signal.OUTPUT_PROJECTION in needs:
            found = replace(found, output_projection=own.projection(layer))
        if Signal.FUTURE_QUERIES in needs:
            future = own.passes.future_queries(seq)[layer][:, seq.num_computed :]
            found = replace(found, future_queries=future)
        if Signal.READ_AGAIN in needs:
            left = f"{self.num_slots} slots of {seq.num_computed} tokens are left"
            assert self.num_slots == seq.num_computed, left
            found = replace(found, read_again=own.passes.read_again(seq, self.source)[layer])
        if Signal.TOKEN_SCORES in needs and seq.state.cells is None:
            found = replace(found, token_scores=self.token_scores[layer])
        return found


class Signals:
    """The signals of all sequences. They are dropped when a sequence ends or is preempted; recomputing it
    gathers equal ones.

    scores:    of the tokens in all slots; None until a policy needs them
    max_bytes: of all stores together (None: no limit). A sequence needs `signal_bytes`; one that would exceed
               the limit fails alone
    states:    for recurrent layers: sequence id -> a pass from its state that stores no state
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: LayerGroups,
        cache: KVCache,
        backend: Backend,
        max_bytes: int | None = None,
        states: Callable[[int], StateStep] | None = None,
    ) -> None:
        self.loaded = loaded
        self.facts = facts = groups.facts
        self.cache = cache
        self.backend = backend
        self._queries: dict[int, QueryStore] = {}
        self.room = ByteBudget(max_bytes)
        self._mass = MassStore(facts, self.room)
        self.digests = DigestStore(facts, cache.number, self.room)
        self.scores: SlotScores | None = None
        self.passes = ExtraPasses(loaded, facts, self.room, states)

    @cached_property
    def _output_projections(self) -> tuple[Tensor, ...]:
        return output_projections(self.loaded.model, self.facts)

    def check(self, compressor: Compressor | None) -> None:
        """Raise InvalidArgumentError if a request's policy needs more signals than there is room for."""
        needs = needs_of(compressor)
        if compressor is None:
            return
        policy, limit = compressor.policy, self.room.limit
        least = signal_bytes(compressor, self.facts, compressor.budget, self.cache.block_size)
        begins = Signal.TOKEN_SCORES in needs and self.scores is None
        scores = score_bytes(self.cache) if begins else 0
        problems = {
            f"keeps {least} bytes of signals for a sequence, but max_signal_bytes is {limit} for all; lower "
            "its window or budget, or raise max_signal_bytes": limit is not None and least > limit,
            f"needs recent queries, but its query_window is {policy.query_window}; it must be at least 1": (
                Signal.RECENT_QUERIES in needs and policy.query_window < 1
            ),
            f"keeps {scores} bytes of scores beside the slots of all blocks, more than the {self.room.used} "
            f"that are taken leave of max_signal_bytes, {limit}; raise it, or lower num_blocks": (
                not self.room.fits(scores)
            ),
        }
        for problem, holds in problems.items():
            require(not holds, f"policy {policy.name} {problem}.", "compression")
        if begins:
            self.keep_scores()
        if Signal.OUTPUT_PROJECTION in needs:
            _ = self._output_projections  # raises for a model without output projections

    def keep_scores(self) -> SlotScores:
        """Keep scores of the tokens in all slots from now on. Raises: MemoryError if there is no room for
        them."""
        if self.scores is None:
            self.room.change(0, score_bytes(self.cache))
            self.scores = SlotScores(self.cache)
            hand_out_inputs(self.loaded.model)
        return self.scores

    @torch.inference_mode()
    def observe(self, step: list[Scheduled], batch: AttentionBatch) -> Observer:
        """Return the observer of a step's queries and attention. Takes rows for new sequences."""
        starts = np.cumsum([0, *(item.num_tokens for item in step)]).tolist()
        watched = [i for i, item in enumerate(step) if is_watched(item.seq)]
        writes = self._score_writes(step, watched, batch)
        drafted = [i for i in watched if step[i].row.num_drafts]
        late = self._late([(step[i], batch.sequences[i], starts[i]) for i in drafted])
        queries: list[QueryWrite] = [] if late is None else [late.see]
        watched = [i for i in watched if not step[i].row.num_drafts]
        by_window: dict[int, list[int]] = {}
        for i in watched:
            if Signal.RECENT_QUERIES in needs_of(step[i].seq.request.compressor):
                by_window.setdefault(window_of(step[i].seq), []).append(i)
        for window, members in by_window.items():
            queries.append(self._query_write(window, [(step[i], starts[i]) for i in members]))
        summed = [i for i in watched if Signal.ATTENTION_MASS in needs_of(step[i].seq.request.compressor)]
        if not summed:
            return Observer(tuple(writes), tuple(queries), late=late)
        sums = StepMass.begin(self._mass, [step[i].seq.seq_id for i in summed], summed, batch)
        queries.append(sums.see(self.cache, self.backend))
        return Observer(tuple(writes), tuple(queries), sums.commit, late)

    @torch.inference_mode()
    def note(
        self, seq: Sequence, first: int, queries: dict[int, Tensor], slots: SequenceSlots | None
    ) -> None:
        """Record the signals that a sequence's policy needs from queries [n, H, D] of each layer, those
        of its tokens from position `first` on. slots: of these tokens; None to record queries alone."""
        needs = needs_of(seq.request.compressor)
        if Signal.RECENT_QUERIES in needs:
            store = self._query_store(window_of(seq))
            for layer, own in queries.items():
                store.write(seq.seq_id, layer, first, own)
        if Signal.ATTENTION_MASS in needs and slots is not None:
            self._mass.take(seq.seq_id)
            self._mass.reserve(slots.seq_len)
            batch = AttentionBatch.build((slots,), self.cache.block_size, self.cache.device)
            rows = self._mass.index([seq.seq_id])
            for layer, own in queries.items():
                self._mass.add(rows, layer, self.backend.column_sums(own, self.cache.layers[layer], batch))

    def forget(self, step: list[Scheduled]) -> None:
        """Undo the signals of a failed step, so that its tokens can be recomputed. Queries are overwritten,
        digests are computed again."""
        for item in step:
            self.digests.drop(item.seq.seq_id)

    def of_pass(
        self, seq: Sequence, num_slots: int, block_ids: Tensor, source: Callable[[int], KeySource]
    ) -> PassSignals:
        """Return the signals of a sequence that is compressed, for the num_slots slots written so far.

        Args:
            block_ids: [blocks] int64, its table on the device
            source:    layer -> its keys and values in these slots
        """
        return PassSignals(self, seq, num_slots, block_ids, source)

    def projection(self, layer: int) -> Tensor:
        """[H, Dv, M] the output projection of a layer."""
        return self._output_projections[layer]

    def mass(self, seq: Sequence, layer: int, num_slots: int) -> Tensor:
        """[K, num_slots] the attention that slots got, where it is summed."""
        return self._mass.row(seq.seq_id)[layer, :, :num_slots]

    def queries_of(self, seq: Sequence) -> Tensor:
        """[L, H, n, D] the last n queries, at most as many as its policy needs, where they are kept."""
        return self._queries[window_of(seq)].last(seq.seq_id, slice(None), seq.num_computed)

    def positions(self, seq: Sequence, num_slots: int) -> Tensor:
        """[L, K, num_slots] int32 logical position of every slot written so far."""
        evicted = seq.num_computed - num_slots
        slots = torch.arange(evicted, seq.num_computed, dtype=torch.int32, device=self.cache.device)
        positions = slots.expand(self.cache.num_layers, self.cache.num_kv_heads, -1)
        known = seq.state.slot_positions
        return positions if known is None else torch.cat([known, positions[..., known.shape[-1] :]], dim=-1)

    @torch.inference_mode()
    def compacted(self, seq: Sequence, kept: Tensor) -> None:
        """Move the signals of slots kept [L | 1, K | 1, M] to slots 0 .. M - 1, and clear those after."""
        if seq.seq_id in self._mass:
            self._mass.move(seq.seq_id, kept)

    @torch.inference_mode()
    def fork(self, parent_id: int, child_id: int) -> None:
        """Copy the parent's signals to the child."""
        for store in (*self._queries.values(), self._mass):
            store.copy(parent_id, child_id)

    @torch.inference_mode()
    def park(self, seq_id: int, num_slots: int) -> ParkedSignals:
        """Move the signals of a sequence of num_slots slots to the host. Digests follow from its keys."""
        parked = self.copy_of(seq_id, num_slots)
        self._leave(seq_id)
        return parked

    @torch.inference_mode()
    def copy_of(self, seq_id: int, num_slots: int) -> ParkedSignals:
        """Copy the signals like `park`; the sequence keeps them."""
        queries = {window: store.copy_of(seq_id) for window, store in self._queries.items()}
        return ParkedSignals(
            {window: kept for window, kept in queries.items() if kept is not None},
            self._mass.copy_of(seq_id, num_slots),
        )

    @torch.inference_mode()
    def resume(self, seq_id: int, parked: ParkedSignals) -> None:
        """Take back parked signals. Raises: MemoryError if there is no room for it."""
        for window, kept in parked.queries.items():
            self._query_store(window).resume(seq_id, kept)
        if parked.mass is not None:
            self._mass.resume(seq_id, parked.mass)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that was preempted or has ended."""
        self._leave(seq_id)
        self.passes.drop(seq_id)

    def _leave(self, seq_id: int) -> None:
        for store in (*self._queries.values(), self._mass, self.digests):
            store.drop(seq_id)

    def _query_store(self, window: int) -> QueryStore:
        if window not in self._queries:
            self._queries[window] = QueryStore(window, self.facts, self.room)
        return self._queries[window]

    def _late(self, items: list[tuple[Scheduled, SequenceSlots, int]]) -> LateSignals | None:
        """Return late signals of items with drafts and policies that keep queries or attention. items: (item,
        its slots, its first row)."""
        found = []
        for item, slots, start in items:
            needs, seq_id = needs_of(item.seq.request.compressor), item.seq.seq_id
            needs_queries = Signal.RECENT_QUERIES in needs
            queries = self._query_store(window_of(item.seq)) if needs_queries else None
            mass = self._mass if Signal.ATTENTION_MASS in needs else None
            if queries is None and mass is None:
                continue
            rows = torch.arange(start, start + item.num_tokens, device=self.cache.device)
            found.append(LateRows(seq_id, item.row.first, rows, queries, mass, partial(as_last, slots)))
        return LateSignals(found, self.cache, self.backend) if found else None

    def _query_write(self, window: int, items: list[tuple[Scheduled, int]]) -> QueryWrite:
        """Stores the last queries of each sequence's chunk; items: (scheduled, first row in the step)."""
        chunks = [(item.seq.seq_id, item.seq.num_computed, item.num_tokens, row) for item, row in items]
        return self._query_store(window).of_step(chunks).write

    def _score_writes(
        self, step: list[Scheduled], watched: list[int], batch: AttentionBatch
    ) -> list[Callable[[AttentionCall], None]]:
        """Return hooks that score the step's tokens, one per compressor. watched: indices in step."""
        members: dict[Compressor, list[int]] = {}
        for i in watched:
            compressor = step[i].seq.request.compressor
            if compressor is not None and Signal.TOKEN_SCORES in compressor.policy.needs:
                members.setdefault(compressor, []).append(i)
        return [score_write(self.scores, compressor, places, batch) for compressor, places in members.items()]
