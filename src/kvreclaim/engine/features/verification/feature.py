"""Drafts from compressed caches for requests that keep every token."""

from __future__ import annotations

from functools import cached_property

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression_settings import BUDGETS
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.compact.passes import CompressionPass
from kvreclaim.engine.execute.graphs import decode_graphs
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.features.verification.companion_copier import CompanionCache, CompanionCopier
from kvreclaim.engine.features.verification.companion_tracker import CompanionTracker, verify_of
from kvreclaim.engine.features.verification.verifier import Verifier
from kvreclaim.engine.request.request import Sequence as Seq
from kvreclaim.engine.request.spec import footprint_of
from kvreclaim.engine.request.verify import Verify
from kvreclaim.engine.step.engine import Engine
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.schedule.budget.footprint import check_blocks
from kvreclaim.schedule.companions import Companions


class Verification(RequestFeature):
    """The request's compression becomes that of a companion, which drafts."""

    option = Verify
    is_made = True  # by the claim
    setting = "verify"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @cached_property
    def verifier(self) -> Verifier:
        """Drafts from compressed caches. Created for the first request in verify mode. Its companions share
        the pool with all sequences, or have it alone where full caches are in host memory."""
        engine = self._engine
        runner, compression = engine.runner, engine.compression
        if engine.device_cache is not None:
            runner, compression = _on_device(engine, engine.device_cache)
        companions: Companions[Seq] = Companions(runner.memory)
        engine.scheduler.take_in(companions)
        full = CompanionCache(engine.memory, engine.runner.layers, engine.runner.stream)
        copier = CompanionCopier(
            full, CompanionCache(runner.memory, runner.layers), engine.backend, engine.signals
        )
        tracker = CompanionTracker(engine.lifecycle, runner, compression, companions, copier)
        return engine.extensions.add(Verifier(engine.lifecycle, tracker, engine.states))

    def claim(self, draft: RequestDraft) -> None:
        engine, drafting, prompt = self._engine, draft.compressor, draft.spec.prompt_token_ids
        assert drafting is not None, "the feature is on"
        check_blocks(draft.footprint, drafting.policy.name)
        engine.signals.check(drafting)
        budgets = budgets_of(drafting, len(prompt) + (draft.spec.params.max_tokens or 0))
        verify = Verify(drafting, draft.footprint, drafting.config.verify_tokens, budgets)
        draft.state[Verify], draft.compressor = verify, None
        draft.footprint = footprint_of(None, engine.limits, prompt, engine.groups)

    def limited(self, draft: RequestDraft, max_len: int) -> None:
        self._engine.runner.expect(None, draft.state[Verify].num_tokens)
        _ = self.verifier  # creates it

    def begin(self, seq: Seq) -> None:
        if (most := self.verifier.max_prefix_hit(verify_of(seq))) is not None:
            seq.max_prefix_hit = most


def budgets_of(compressor: Compressor, num_tokens: int) -> tuple[int, ...]:
    """Return the steps of an automatic budget, up to the first that holds num_tokens; none for a fixed
    budget."""
    config = compressor.config
    if not config.auto_budget:
        return ()
    first = next((i for i, b in enumerate(BUDGETS) if b >= num_tokens), len(BUDGETS))
    return tuple(b for b in BUDGETS[: first + 1] if b >= config.budget)


def _on_device(engine: Engine, cache: KVCache) -> tuple[ModelRunner, CompressionPass]:
    """Return what computes and compresses companions that have the device's pool for themselves."""
    config, groups, backend, signals = engine.config, engine.groups, engine.backend, engine.signals
    assert config.num_blocks is not None, "the engine's limits are set"
    memory = MemoryManager(config.num_blocks, config.block_size, enable_prefix_caching=False)
    graphs = decode_graphs(engine.loaded.model, cache, backend, config, groups)
    runner = ModelRunner(engine.loaded, groups, memory, cache, backend, signals, graphs=graphs)
    return runner, CompressionPass(PassContext(memory, cache, backend, groups.facts, signals), engine.totals)
