"""Sequences that go on from others: further outputs of a prompt, and beams."""

from __future__ import annotations

from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.request.request import Request, Sequence
from kvreclaim.engine.sampling.beam_search import Hypothesis
from kvreclaim.engine.sampling.detokenizer import Detokenizer


class Branches:
    """A child shares all blocks of its parent, and begins with what goes with them."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle

    def fork(self, parent: Sequence) -> list[Sequence]:
        """The siblings of a prompt that has just been computed; they share all its blocks, or wait."""
        request, parent.seats = parent.request, 1
        children = []
        for index in range(1, request.params.n):
            child = self.lifecycle.new_sequence(request, index, list(parent.token_ids), parent.footprint)
            if self.lifecycle.scheduler.fork(parent, child):
                self._copy(parent, child)
            children.append(child)
        return children

    def fork_followers(self, leader: Sequence) -> None:
        """One that is computed again for others, too, has the tokens that all of them have."""
        for follower in self.lifecycle.scheduler.fork_followers(leader):
            self._copy(leader, follower)

    def reorder(self, request: Request, chosen: list[tuple[int, int]]) -> None:
        """The next beams, the best one first: each goes on from one of the sequences with a token. A sequence
        that none goes on from gives its blocks back, one that several go on from is forked."""
        before, beams = request.sequences, request.beams
        assert beams is not None, f"request {request.request_id} is no beam search"
        parents = [before[min(beam, len(before) - 1)] for beam, _ in chosen]
        for seq in before:
            seq.seats = 1
            if seq not in parents:
                beams.retire(seq)
                seq.finish_reason = "abort"
                self.lifecycle.release(seq)
        request.sequences = list(dict.fromkeys(parents))
        moved: set[int] = set()
        after = []
        for parent in parents:
            is_free = parent.seq_id not in moved
            moved.add(parent.seq_id)
            after.append(parent if is_free else self._branch(parent))
        for index, (seq, (_, token)) in enumerate(zip(after, chosen, strict=True)):
            seq.index = index
            seq.token_ids.append(token)
        request.sequences = after

    def conclude(self, request: Request) -> None:
        """A beam search is over: its outputs take the place of the beams."""
        beams = request.beams
        assert beams is not None, f"request {request.request_id} is no beam search"
        for seq in request.sequences:
            beams.retire(seq)
        found = [self._concluded(request, *item) for item in enumerate(beams.search.best())]
        self.lifecycle.end_request(request, "stop" if beams.search.best()[0].ended else "length")
        request.sequences = found

    def _branch(self, parent: Sequence) -> Sequence:
        child = self.lifecycle.new_sequence(parent.request, 0, list(parent.token_ids), parent.footprint)
        has_run = self.lifecycle.scheduler.fork(parent, child)
        assert has_run, f"no seat is left for a beam of request {parent.request_id}"
        self._copy(parent, child)
        return child

    def _copy(self, parent: Sequence, child: Sequence) -> None:
        """It holds its parent's blocks: it begins with all that goes with them."""
        child.state, child.lineage = parent.state.fork(), parent.lineage
        child.begun_with = parent.begun_with
        if not child.request.is_plain:
            self.lifecycle.signals.fork(parent.seq_id, child.seq_id)
        for extension in self.lifecycle.extensions.ordered:
            extension.forked(parent, child)

    def _concluded(self, request: Request, index: int, found: Hypothesis) -> Sequence:
        loaded = self.lifecycle.loaded
        seq = Sequence(
            seq_id=self.lifecycle.new_id(),
            request_id=request.request_id,
            token_ids=[*request.prompt_token_ids, *found.token_ids],
            num_prompt=len(request.prompt_token_ids),
            max_len=request.max_len,
            index=index,
            request=request,
            finish_reason="stop" if found.ended else "length",
            hypothesis=found,
        )
        if loaded.tokenizer is not None:
            seq.detokenizer = Detokenizer(loaded.tokenizer, ())
            for token in found.token_ids:
                seq.detokenizer.append(token, may_stop=False)
            seq.detokenizer.finish()
        if (reader := request.reader) is not None:
            seq.reader = reader
            for token in found.token_ids:
                reader.take(token)
        return seq
