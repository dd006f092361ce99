"""The draft model's cache: its own sequences, blocks and recurrent states, which follow the target's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvreclaim.config import EngineConfig
from kvreclaim.engine.execute.graphs import decode_graphs
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.request.request import Request, Scheduled, Sequence
from kvreclaim.engine.request.sizing import state_slots_of
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.speculative.load import DraftModel
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.recurrent import RecurrentLayers
from kvreclaim.ops.backend import Need, choose_backend
from kvreclaim.ops.formats.format import plain_format
from kvreclaim.ops.groups import layer_groups
from kvreclaim.ops.native import torch_alone
from kvreclaim.ops.states import StateRun, StateStep, StateStore
from kvreclaim.schedule import Row
from kvreclaim.speculation import MOST_DRAFTS


class DraftStates:
    """Lengths with a stored state and their slots, per sequence, ascending: the committed length, that of the
    known tokens, and those of drafts."""

    def __init__(self, layers: RecurrentLayers, store: StateStore, num_slots: int) -> None:
        self.layers, self.store = layers, store
        self._free = list(range(num_slots))
        self._held: dict[int, list[tuple[int, int]]] = {}

    def back_to(self, seq_id: int, length: int) -> int:
        """Keep the longest state of at most `length` tokens. Returns: its length; 0: none."""
        held = self._held.pop(seq_id, [])
        kept = max((one for one in held if one[0] <= length), default=None)
        self._free += [slot for at, slot in held if kept is None or at != kept[0]]
        if kept is None:
            return 0
        self._held[seq_id] = [kept]
        return kept[0]

    def forget(self, seq_id: int) -> None:
        """Free a sequence's slots."""
        self._free += [slot for _, slot in self._held.pop(seq_id, [])]

    @contextmanager
    def stepping(self, step: list[Scheduled], num_known: dict[int, int]) -> Iterator[None]:
        """Store states of a pass over these tokens, which follow each sequence's last state. A failed pass
        stores none. num_known: tokens that are not drafts, by seq_id."""
        runs, start = list[StateRun](), 0
        for item in step:
            held = self._held.setdefault(item.seq.seq_id, [])
            last, slot = held[-1] if held else (0, None)
            assert last == item.row.first, f"the state is behind {last} tokens of {item.row.first}"
            runs.append(StateRun(start, item.num_tokens, slot, [self._free.pop()]))
            start += item.num_tokens
        try:
            with self.layers.stepping(StateStep(self.store, runs)):
                yield
        except BaseException:
            self._free += [run.writes[0] for run in runs]
            raise
        for item, run in zip(step, runs, strict=True):
            held, end = self._held[item.seq.seq_id], item.row.first + item.num_tokens
            held.append((end, run.writes[0]))
            if end <= num_known[item.seq.seq_id] and len(held) > 2:
                self._free.append(held.pop(-2)[1])  # between two chunks of a prompt


logger = logging.getLogger(__name__)

IDLE_ROUNDS = 64
"""Rounds without drafts after which a sequence may be dropped for one that lacks room. With fewer rounds,
sequences that alternate would be recomputed repeatedly."""


@dataclass(slots=True, eq=False)
class Mirror:
    """The draft model's copy of a sequence: `own` has its tokens, then its drafts. num_computed of them are
    committed.

    num_known:   leading tokens that the target had in `round`, the last round with drafts for it
    num_written: leading tokens with keys and values in the cache, drafts included
    """

    own: Sequence
    num_known: int
    num_written: int
    round: int


class DraftCache:
    """A draft model over its own pool. A round writes drafts and commits nothing. The next round commits the
    drafts that the target accepted, so nothing is ever rolled back."""

    def __init__(self, draft: DraftModel) -> None:
        self.loaded, config = draft.loaded, draft.config
        facts, size = self.loaded.facts, config.block_size
        assert config.num_blocks is not None, "chosen"
        assert config.max_model_len is not None, "chosen"
        self._max_num_seqs = config.max_num_seqs
        self.max_len, self.max_step_tokens = config.max_model_len, config.max_num_batched_tokens
        form, groups = plain_format(facts.dtype), layer_groups(facts, config)
        need = Need(facts.layers, size, facts.dtype, facts.device, form)
        self.ops = choose_backend(config.kernels, need).backend
        like = next(self.loaded.model.parameters()).new_empty(0, dtype=facts.dtype)
        self.cache = self.ops.allocate(facts.layers, config.num_blocks, size, like=like, kv_format=form)
        self.memory = MemoryManager(
            config.num_blocks, size, enable_prefix_caching=config.enable_prefix_caching
        )
        signals = Signals(self.loaded, groups, self.cache, self.ops, config.max_signal_bytes)
        self.states = self._make_states(config)
        graphs = None
        if self.states is None:
            graphs = decode_graphs(self.loaded.model, self.cache, self.ops, config, groups)
        self.runner = ModelRunner(
            self.loaded, groups, self.memory, self.cache, self.ops, signals, graphs=graphs
        )
        self._mirrors: dict[int, Mirror] = {}
        self._refused: set[int] = set()
        self._round = 0

    def _make_states(self, config: EngineConfig) -> DraftStates | None:
        """Return the states of recurrent layers; None for a model without such layers."""
        facts, layers = self.loaded.facts, self.loaded.recurrent
        if layers is None:
            return None
        num_slots = state_slots_of(config, facts).num_slots
        return DraftStates(layers, StateStore(facts.states, num_slots, facts.device), num_slots)

    def begin_round(self, sequences: Iterable[Sequence]) -> None:
        """Begin a round that drafts for these sequences."""
        self._round += 1
        for seq in sequences:
            if (mirror := self._mirrors.get(seq.seq_id)) is not None:
                mirror.round = self._round

    def follow(self, seq: Sequence, num_drafts: int) -> Sequence | None:
        """Return the draft model's own sequence, with all of the target's tokens and room for num_drafts
        more; None if there is no room, or the sequence cannot be drafted for.

        Its generator is a copy of the target's, so both draw with the same noise.
        """
        if seq.seq_id in self._refused:
            return None
        mirror = self._mirrors.get(seq.seq_id)
        new = seq.token_ids if mirror is None else seq.token_ids[mirror.num_known :]
        if max(new, default=0) >= self.loaded.vocab_size:
            self.refuse(seq.seq_id)  # an id outside of this model's vocabulary
            return None
        if mirror is None:
            if self.states is not None and not self._has_seat():
                return None
            mirror = self._mirrors[seq.seq_id] = self._begin(seq)
        self._take_in(mirror, seq)
        own = mirror.own
        if seq.generator is not None and own.generator is not None:
            own.generator.set_state(seq.generator.get_state())
        return own if self._make_room(own, own.num_uncomputed + num_drafts - 1) else None

    def read(self, owns: list[Sequence]) -> tuple[list[Sequence], Tensor]:
        """Compute all uncomputed tokens of these sequences, max_num_batched_tokens at a time.

        Returns: the sequences that succeeded, and the logits [n, V] of the last token of each. A sequence
        that fails gets no more drafts.
        """
        done: list[Sequence] = []
        parts: list[Tensor] = []
        while owns:
            items, logits = self._forward(self._next_step(owns))
            last = []
            for place, item in enumerate(items):
                end = item.row.first + item.num_tokens
                self._mirrors[item.seq.seq_id].num_written = end
                if end == len(item.seq.token_ids):
                    last.append(place)
                    done.append(item.seq)
            if last:
                parts.append(logits[last])
            ended = {own.seq_id for own in done}
            owns = [own for own in owns if own.seq_id in self._mirrors and own.seq_id not in ended]
        return done, torch.cat(parts) if parts else torch.empty(0)

    def refuse(self, seq_id: int) -> None:
        """Stop drafting for a sequence, and invalidate its blocks."""
        if seq_id in self._mirrors:
            self.memory.invalidate(seq_id)
        self.forget(seq_id)
        self._refused.add(seq_id)

    def forget(self, seq_id: int) -> None:
        """Free a sequence's blocks and states. Drafting for it again recomputes its tokens."""
        self._refused.discard(seq_id)
        if self._mirrors.pop(seq_id, None) is not None:
            self.memory.free(seq_id)
            if self.states is not None:
                self.states.forget(seq_id)

    def _begin(self, seq: Sequence) -> Mirror:
        params = replace(seq.request.params, logprobs=None, prompt_logprobs=None)
        prompt = seq.request.prompt_token_ids
        spec = RequestSpec(request_id=seq.request_id, prompt_token_ids=prompt, params=params)
        request = Request(spec, None, seq.max_len, seq.request.seed, bad_words=seq.request.bad_words)
        own = Sequence(
            seq_id=seq.seq_id,
            request_id=seq.request_id,
            token_ids=list(seq.token_ids),
            num_prompt=seq.num_prompt,
            max_len=seq.max_len,
            request=request,
            generator=None if seq.generator is None else torch.Generator(),
        )
        match = self.memory.match_prefix(self.memory.keys(own.token_ids, seq.request.spec.cache_salt))
        self.memory.admit(seq.seq_id, match)
        own.num_computed = match.num_tokens
        return Mirror(own, len(own.token_ids), match.num_tokens, self._round)

    def _take_in(self, mirror: Mirror, seq: Sequence) -> None:
        """Append the target's new tokens, and commit those that are written. The last one stays uncomputed,
        because its logits give the next draft."""
        own, known = mirror.own, seq.token_ids
        end = min(mirror.num_written, len(known) - 1)
        agreed = min(mirror.num_known, end)
        while agreed < end and own.token_ids[agreed] == known[agreed]:
            agreed += 1
        del own.token_ids[agreed:]
        own.token_ids += known[agreed:]
        if self.states is not None:
            agreed = self.states.back_to(own.seq_id, agreed)
        self.memory.commit(own.seq_id, agreed - own.num_computed)
        own.num_computed = mirror.num_written = agreed
        mirror.num_known = len(known)

    def _has_seat(self) -> bool:
        """Return whether there are states for one more sequence. Sequences outside this round are dropped."""
        if len(self._mirrors) >= self._max_num_seqs:
            last = min(self._mirrors.values(), key=lambda mirror: mirror.round)
            if last.round == self._round:
                return False
            self.forget(last.own.seq_id)
        return True

    def _make_room(self, own: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for num_tokens tokens after the committed ones, dropping long idle sequences."""
        while not self.memory.can_grow(own.seq_id, num_tokens):
            last = min(self._mirrors.values(), key=lambda mirror: mirror.round)
            if self._round - last.round < IDLE_ROUNDS:
                return False
            self.forget(last.own.seq_id)
        fresh = self.memory.grow(own.seq_id, num_tokens).new_blocks
        if fresh:
            self.ops.prepare_blocks(self.cache, list(fresh))
        return True

    def _next_step(self, owns: list[Sequence]) -> list[Scheduled]:
        items, room = [], self.max_step_tokens
        for own in owns:
            first = self._mirrors[own.seq_id].num_written
            if (count := min(len(own.token_ids) - first, room)) > 0:
                items.append(Scheduled(own, Row(own.seq_id, first, count)))
                room -= count
        return items

    def _forward(self, items: list[Scheduled]) -> tuple[list[Scheduled], Tensor]:
        """Run the draft model. Returns: the items that could be computed, and a row of logits for each."""
        few = all(item.num_tokens <= MOST_DRAFTS + 1 for item in items)
        try:
            with torch_alone() if few else nullcontext(), self._stepping(items):
                return items, self.runner.forward(items)[0]
        except Exception:
            logger.exception("a forward pass of the draft model over %d sequences failed", len(items))
            if len(items) == 1:
                self.refuse(items[0].seq.seq_id)
                return [], torch.empty(0)
        each = [self._forward([item]) for item in items]
        found = [item for done, _ in each for item in done]
        return found, torch.cat([logits for done, logits in each if done]) if found else torch.empty(0)

    def _stepping(self, items: list[Scheduled]) -> AbstractContextManager[None]:
        if self.states is None:
            return nullcontext()
        known = {item.seq.seq_id: self._mirrors[item.seq.seq_id].num_known for item in items}
        return self.states.stepping(items, known)
