"""Which requests are compressed before a step, and into which blocks: integers only, nothing of vLLM.

Decided from lengths alone, before vLLM schedules: what a pass gives back serves the very same step, and no
block of that step enters the prefix index with content that was computed over an evicted context. Sources go
back to the pool at once. Whoever takes them writes them in this step or a later one, and every worker carries
out the passes of a step, in their order, before anything else of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvreclaim.compression import CompressionConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.accounts import FRESH, Account, Caps, Forecast, Pool, Request, State
from kvreclaim.integrations.vllm.options import Options, most_tokens
from kvreclaim.integrations.vllm.passes import Pass, Totals
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.schedule.plan import plan_compaction
from kvreclaim.schedule.protection import kept_prompt_slots

logger = logging.getLogger("vllm.kvreclaim")


class Ledger:
    """The passes, and what they have come to.

    Args:
        options:    checked
        pool:       see there
        block_size: of a block of the pool, tokens
        max_chunk:  tokens that one step computes at most
    """

    def __init__(self, options: Options, pool: Pool, block_size: int, max_chunk: int) -> None:
        self.options = options
        self.pool = pool
        self.block_size = block_size
        self.max_chunk = max_chunk
        self.totals = Totals()
        self.accounts: dict[str, Account] = {}
        self._forecasts: dict[int, Forecast] = {}

    def compress(self, running: Sequence[Request]) -> list[Pass]:
        """Shrink every request that is due, in order; pool and tables are changed at return.

        A pass whose blocks cannot be had is postponed: the request stays due. Called once before each step.
        """
        self._forecasts.clear()
        passes = []
        for request in running:
            account = self._account(request)
            if account.settings is not None and self._is_due(request, account):
                done = self._compress_one(request, account, account.settings)
                if done is not None:
                    passes.append(done)
        return passes

    def is_current(self, done: Pass) -> bool:
        """Whether the blocks of the pass are still its request's: not since it was preempted or finished."""
        account = self.accounts.get(done.request_id)
        return account is not None and account.state.shift == done.shift

    def forget(self, request_id: str) -> None:
        """Its blocks are gone: preempted, finished or aborted. What it has given back stays on record."""
        account = self.accounts.get(request_id)
        if account is not None:
            account.state = FRESH

    def close(self, request_id: str) -> None:
        """The request is over; its id may be used again."""
        self.accounts.pop(request_id, None)

    def figures(self, request: Request) -> dict[str, int] | None:
        """What compression has done to the request so far, also before a preemption; None: it is off."""
        account = self._account(request)
        if account.settings is None:
            return None
        return {
            "tokens_evicted": account.tokens_evicted,
            "blocks_freed": account.blocks_freed,
            "compactions": account.compactions,
            "kv_tokens": request.num_computed_tokens - account.state.shift,
        }

    def caps(self, request: Request) -> Caps | None:
        """None: it may come to hold its whole length."""
        account = self._account(request)
        settings = account.settings
        if settings is None or account.most is None or request.resumable:
            return None
        settled = settings.budget + self._interval(settings)
        return Caps(
            prefill=self._blocks(min(request.num_tokens, account.most)),
            settled=self._blocks(min(request.num_tokens, settled)),
        )

    def room(self, request: Request, running: Sequence[Request]) -> int | None:
        """Blocks to leave free when the request is admitted, so that it costs nobody a preemption later.

        A forecast from the lengths so far, not from max_tokens: most answers end long before, and who may
        never come to be compressed is admitted as vLLM would. Blocks that several share are counted once.

        Args:
            running: who runs; within a step only newcomers come to it, at its end

        Returns: what the running requests grow by while the newcomer's prompt is computed; None if all of
            them together overfill the pool once their prompts are computed.
        """
        caps = self.caps(request)
        if caps is None or not running:
            return 0
        steps = -(-request.num_tokens // self.max_chunk)
        each = 1 + steps // self.block_size
        forecast = self._forecasts.setdefault(each, Forecast())
        for other in running[forecast.num_seen :]:
            self._look_ahead(other, each, forecast)
        forecast.num_seen = len(running)
        return None if forecast.missing + caps.settled > self.pool.num_free else forecast.growth

    def _look_ahead(self, other: Request, each: int, forecast: Forecast) -> None:
        """Add a running request that decodes at most `each` blocks further in the time."""
        caps = self.caps(other)
        if caps is None:
            return
        held = self._held(other.request_id)
        is_prefill = other.num_computed_tokens < other.num_tokens - 1
        growth = caps.prefill - held if is_prefill else min(caps.settled - held, each)
        forecast.growth += max(0, growth)
        forecast.missing += caps.settled - held

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that one request of this length may hold under the engine's own settings."""
        most = self.options.bound(self.block_size, self.max_chunk)
        return self._blocks(num_tokens if most is None else min(num_tokens, most))

    def _account(self, request: Request) -> Account:
        account = self.accounts.get(request.request_id)
        if account is None:
            account = self.accounts[request.request_id] = self._open(request)
        return account

    def _open(self, request: Request) -> Account:
        """Settings that cannot be read were refused before the request came here; an exception would end the
        engine for everybody."""
        params = request.sampling_params
        try:
            settings = self.options.of_request(None if params is None else params.extra_args)
        except InvalidArgumentError as error:
            logger.error("request %s is not compressed: %s", request.request_id, error)
            settings = None
        most = None if settings is None else most_tokens(settings, self.block_size, self.max_chunk)
        return Account(settings, most)

    def _is_due(self, request: Request, account: Account) -> bool:
        """Sessions that resume with more input are left alone: they send their whole table again."""
        settings, state = account.settings, account.state
        assert settings is not None
        if request.resumable:
            return False
        if account.most is None:
            num_prompt = request.num_prompt_tokens
            worth = num_prompt - settings.budget >= self.block_size
            return worth and not state.shift and request.num_computed_tokens >= num_prompt
        live = request.num_computed_tokens - state.shift
        return live >= settings.budget + self._interval(settings)

    def _compress_one(self, request: Request, account: Account, settings: CompressionConfig) -> Pass | None:
        """Bring it back to its budget, and up to a block more: what goes is a multiple of the block size,
        so that later tokens keep their places within blocks."""
        state, computed = account.state, request.num_computed_tokens
        live = computed - state.shift
        gone = (live - settings.budget) // self.block_size * self.block_size
        table = self.pool.table(request.request_id)
        assert gone > 0, f"{request.request_id} is due with {live} tokens"
        assert len(table.block_ids) == self._blocks(live), f"{live} tokens in {len(table.block_ids)} blocks"
        keep = live - gone
        plan = plan_compaction(request.request_id, table, keep, self.block_size, num_free=self.pool.num_free)
        if plan is None:
            self.totals.postponed += 1
            return None
        prompt = state.prompt_slots + self._new_prompt(request, state)
        done = self.pool.apply(request.request_id, plan)
        account.state = State(state.shift + gone, self._kept_prompt(settings, live, prompt, keep), computed)
        self._count(account, gone, done.blocks_freed)
        source_ids = tuple(block for block in table.block_ids if block is not None)
        return Pass(
            request.request_id,
            settings,
            source_ids,
            done.target_ids,
            num_tokens=live,
            keep=keep,
            logical_len=computed,
            prompt_slots=prompt,
            first=state.shift == 0,
            shift=account.state.shift,
        )

    def _new_prompt(self, request: Request, state: State) -> int:
        """Prompt tokens computed since the last pass."""
        num_prompt = request.num_prompt_tokens
        return min(num_prompt, request.num_computed_tokens) - min(num_prompt, state.last_computed)

    def _kept_prompt(self, settings: CompressionConfig, live: int, prompt: int, keep: int) -> int:
        return kept_prompt_slots(
            num_tokens=live,
            prompt_slots=prompt,
            keep=keep,
            sinks=settings.sinks,
            recent=settings.recent,
            protect_prompt=settings.protect_prompt,
        )

    def _count(self, account: Account, gone: int, freed: int) -> None:
        """Where others hold the sources a pass takes more blocks than come back: that counts as none."""
        for figures in (account, self.totals):
            figures.tokens_evicted += gone
            figures.blocks_freed += max(0, freed)
            figures.compactions += 1

    def _held(self, request_id: str) -> int:
        """Blocks of a request that is not new."""
        return self.pool.places(request_id) - self.accounts[request_id].state.shift // self.block_size

    def _interval(self, settings: CompressionConfig) -> int:
        """Less than a block gives nothing back."""
        return max(settings.interval, self.block_size)

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)
