"""The shadow with signals: sums up fp64 attention by logical position, remembers every query, and compares
both, and the positions, with what each pass is given."""

from __future__ import annotations

import torch
from shadow import History, Shadow
from torch import Tensor

from kvreclaim import LLM
from kvreclaim.compression.policy import LayerSignals
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.engine.signals.signals import PassSignals
from kvreclaim.model.attention import AttentionCall, LatentCall

PerLayer = dict[int, Tensor]


class SignalShadow(Shadow):
    """worst_mass: largest difference of a slot's attention mass, relative to 1 + the mass."""

    def __init__(self, llm: LLM, monkeypatch) -> None:
        super().__init__(llm, monkeypatch)
        self.mass: dict[int, PerLayer] = {}
        self.queries: dict[int, PerLayer] = {}
        self.worst_mass = 0.0
        self.num_checked = 0
        self._before: dict[int, dict[int, Tensor | None]] = {}
        self._watch_signals(llm, monkeypatch)

    def _watch_signals(self, llm: LLM, monkeypatch) -> None:
        of = PassSignals.of

        def watched_of(signals: PassSignals, layer: int) -> LayerSignals:
            found = of(signals, layer)
            if signals.signals is llm.engine.signals:
                self._check(signals.seq, layer, found)
            return found

        monkeypatch.setattr(PassSignals, "of", watched_of)

    def _check(self, seq: Sequence, layer: int, signals: LayerSignals) -> None:
        history, compressor = self.histories[seq.seq_id], seq.request.compressor
        assert history.live is not None
        assert compressor is not None
        live, layer = history.live[layer], self.groups.facts.ids[layer]
        if signals.mass is not None:
            want = self.mass[seq.seq_id][layer].gather(-1, live)
            self.worst_mass = max(self.worst_mass, float(((signals.mass - want).abs() / (1 + want)).max()))
        if signals.positions is not None:
            assert torch.equal(signals.positions.long(), live)
            assert signals.positions.dtype == torch.int32
        if signals.queries is not None:
            window = min(compressor.policy.query_window, seq.num_computed)
            every = self.queries[seq.seq_id][layer]
            assert torch.equal(signals.queries, every[:, seq.num_computed - window : seq.num_computed])
        self.num_checked += 1

    def _compare(self, call: AttentionCall, out: Tensor, latent: LatentCall | None = None) -> None:
        """A fork inherits what its parent had before this step."""
        self._before = {
            id(store): {seq_id: layers.get(call.layer) for seq_id, layers in store.items()}
            for store in (self.mass, self.queries)
        }
        super()._compare(call, out, latent)

    def _probabilities(self, item: Scheduled, history: History, call: AttentionCall, rows: slice) -> Tensor:
        probs = super()._probabilities(item, history, call, rows)
        mass = self._so_far(self.mass, item, call.layer, probs[:, 0, 0, :0])
        grown = torch.cat([mass, mass.new_zeros(len(mass), item.num_tokens)], 1)
        self.mass[item.seq.seq_id][call.layer] = grown + probs.sum((1, 2))
        new = call.q[rows].transpose(0, 1)
        old = self._so_far(self.queries, item, call.layer, new[:, :0])
        self.queries[item.seq.seq_id][call.layer] = torch.cat([old, new], 1)
        return probs

    def _so_far(self, store: dict[int, PerLayer], item: Scheduled, layer: int, nothing: Tensor) -> Tensor:
        """Signals of the positions before this chunk; none for a sequence that starts (again)."""
        seq, start = item.seq, item.seq.num_computed
        own = store.setdefault(seq.seq_id, {}).get(layer)
        if own is None and start > 0:
            own = self._before[id(store)][seq.request.sequences[0].seq_id]
        if start == 0:
            return nothing
        assert own is not None
        return own[:, :start]
