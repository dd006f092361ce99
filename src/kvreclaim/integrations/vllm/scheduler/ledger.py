"""Decide the passes and admissions of a step, with integers only and without vLLM. The time, size and blocks
of passes are computed by the engine's own code, schedule/.

Passes are decided from lengths alone, before vLLM schedules or, if another request must be preempted first,
before vLLM allocates the request's next slots. So the same step can use the freed blocks, and none of its
blocks enters the prefix index with content that was computed over an evicted context. Source blocks are freed
at once. The request that takes them writes them in this step or a later one, and every worker carries out the
passes of a step, in their order, before anything else of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.scheduler.accounts import (
    Caps,
    Forecast,
    PlacedPool,
    RequestAccount,
    VllmRequest,
)
from kvreclaim.integrations.vllm.scheduler.passes import StepMessage, Totals
from kvreclaim.integrations.vllm.settings.layer_needs import query_window
from kvreclaim.integrations.vllm.settings.options import Options, plain_footprint
from kvreclaim.integrations.vllm.settings.speculation import NO_DRAFTS, Drafts
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.schedule import EvictionCounters, Pass
from kvreclaim.schedule.budget.ledger import compress

logger = logging.getLogger("vllm.kvreclaim")


class Ledger:
    """Decides passes and keeps their totals.

    Args:
        options:    checked
        pool:       see there
        block_size: of a block of the pool, tokens
        max_chunk:  tokens that one step computes at most
        drafts:     of speculative decoding
    """

    def __init__(
        self,
        options: Options,
        pool: PlacedPool,
        block_size: int,
        max_chunk: int,
        drafts: Drafts = NO_DRAFTS,
    ) -> None:
        self.options = options
        self.pool = pool
        self.block_size = block_size
        self.max_chunk = max_chunk
        self.drafts = drafts
        self.totals = Totals()
        self.records: dict[str, RequestAccount] = {}
        self._plain = plain_footprint(block_size, max_chunk)
        self._forecasts: dict[int, Forecast] = {}
        self._passes: list[Pass[str]] = []
        self._lacking: set[str] = set()

    def compress(self, running: Sequence[VllmRequest]) -> list[Pass[str]]:
        """Compress every due request, in order. Pool and tables are changed at return. Called once before
        each step. If a pass lacks blocks, its request computes nothing before it: see `may_go_on`. Drafts
        that would be verified beyond a request's next pass are dropped.

        Returns: the step's passes, to which `may_go_on` adds.
        """
        self._forecasts.clear()
        self._lacking.clear()
        self._passes = []
        for request in running:
            record = self._record(request)
            lengths = request.num_computed_tokens, request.num_prompt_tokens
            # Sessions that resume with more input are left alone: they send their whole table again.
            if request.resumable:
                continue
            if record.footprint.is_due(*lengths, record.account) and not self._pass(request, record):
                self._lacking.add(request.request_id)
        if self.drafts.most:
            for request in running:
                if request.spec_token_ids and not request.resumable:
                    self.drafts.cut(request, self._until_pass(request))
        return self._passes

    def _until_pass(self, request: VllmRequest) -> int:
        """Return the tokens that may be computed before the next pass; 1 if a pass lacks blocks."""
        if request.request_id in self._lacking:
            return 1
        record = self._record(request)
        lengths = request.num_computed_tokens, request.num_prompt_tokens
        return record.footprint.tokens_until_pass(*lengths, record.account)

    def may_go_on(self, request: VllmRequest) -> bool:
        """Return whether a running request may compute its next tokens. False: its pass lacks blocks, because
        its own are shared. vLLM preempts a request and calls this again."""
        if request.request_id in self._lacking:
            if not self._pass(request, self._record(request)):
                return False
            self._lacking.remove(request.request_id)
        return True

    def _pass(self, request: VllmRequest, record: RequestAccount) -> bool:
        """Carry out the pass of a request that is due. Returns: whether there were blocks for it."""
        lengths = request.num_computed_tokens, request.num_prompt_tokens
        num_spare = self.pool.places(request.request_id) - self._blocks(request.num_computed_tokens)
        pool = self.pool.covering(num_spare)
        done = compress(request.request_id, *lengths, record.footprint, record.account, pool)
        if done is None:
            return False
        for counts in (record.counts, self.totals):
            counts.add(done)
        record.kept = done.keep
        self._passes.append(done)
        return True

    def message(self, passes: Iterable[Pass[str]]) -> StepMessage | None:
        """Return the message to the workers about passes of a step that vLLM has scheduled; None: none."""
        alive, settings = tuple(filter(self.is_current, passes)), {}
        for done in alive:
            own = self.records[done.seq_id].settings
            assert own is not None, f"request {done.seq_id} is not compressed"
            settings[done.seq_id] = own
        self._passes = []
        return StepMessage(alive, settings) if alive else None

    def current_passes(self) -> tuple[Pass[str], ...]:
        """Return the passes of the step that vLLM schedules now, without those of preempted requests."""
        return tuple(filter(self.is_current, self._passes))

    def has_unsent(self, request_id: str) -> bool:
        """Return whether the request has a pass that is not in a message yet."""
        return any(done.seq_id == request_id for done in self._passes)

    def is_compressed(self, request_id: str) -> bool:
        """Return whether the request has had a pass since its cache began."""
        record = self.records.get(request_id)
        return record is not None and record.account.num_evicted > 0

    def most_hit(self, request: VllmRequest) -> int | None:
        """Return the longest prefix hit of a request that leaves room for one step's tokens, and the queries
        that its first pass needs to be computed; None: no bound."""
        footprint, found = self._record(request).footprint, []
        if footprint.window != 1:
            found.append(footprint.hit_limit(request.num_prompt_tokens, request.num_tokens))
        if self.caps(request) is not None:
            chunk = self._blocks(min(request.num_tokens, self.max_chunk))
            others = self.pool.others_most(request.num_tokens)
            found.append((self.pool.num_blocks - chunk - others) * self.block_size)
        return min(found) // self.block_size * self.block_size if found else None

    def hit_boundary(self, request: VllmRequest, step: range, tail: int, known: int) -> int:
        """Return the boundary inside a request at which vLLM keeps blocks of sliding windows for others: the
        end of the tokens before the first pass, or `known`, the end of prefixes that others share.

        Args:
            step: tokens that are computed next
            tail: tokens of whole blocks of windows that a hit needs
        """
        record, num_prompt = self._record(request), request.num_prompt_tokens
        first = record.footprint.first_pass(num_prompt)
        if first is None or record.account.num_evicted:
            return known
        early = first - 1  # the id of the last token may come after its pass
        if step.start < known < early:
            return known
        is_last = record.footprint.is_due(step.stop, num_prompt, record.account)
        end = step.stop // self.block_size * self.block_size
        return end if is_last and end - step.start >= tail else early

    def ends_exact(self, request: VllmRequest, step: range) -> bool:
        """Return whether the first pass follows this step, and the step ends with a block. Others may then
        find its recurrent state."""
        record = self._record(request)
        is_last = record.footprint.is_due(step.stop, request.num_prompt_tokens, record.account)
        return is_last and not record.account.num_evicted and step.stop % self.block_size == 0

    def is_current(self, done: Pass[str]) -> bool:
        """Return whether the request still has the blocks of the pass: it was not preempted or finished."""
        record = self.records.get(done.seq_id)
        return record is not None and record.account.num_evicted == done.shift

    def forget(self, request_id: str) -> None:
        """Reset the account of a request that has lost its blocks. Its totals remain."""
        record = self.records.get(request_id)
        if record is not None:
            record.account = EvictionCounters()
        self._lacking.discard(request_id)

    def settings_of(self, request: VllmRequest) -> CompressionConfig | None:
        """Return the request's settings; None if it is not compressed."""
        return self._record(request).settings

    def begin(
        self, request: VllmRequest, account: EvictionCounters, num_tokens: int, is_prompt: bool
    ) -> None:
        """Begin a request's cache with num_tokens tokens of a snapshot, and its account."""
        self._record(request).account = account
        self.totals.snapshot_tokens += num_tokens if is_prompt else request.num_prompt_tokens

    def close(self, request_id: str) -> None:
        record = self.records.pop(request_id, None)
        if record is not None and record.promise is not None:
            self.totals.end(record.budget, record.kept)

    def figures(self, request: VllmRequest) -> dict[str, int] | None:
        """Return figures of the request's compression, also from before a preemption; None: it is off."""
        record = self._record(request)
        if record.promise is None:
            return None
        settled = request.num_computed_tokens - request.num_output_placeholders
        live = settled - record.account.num_evicted
        promise = {"promised": record.in_words, "budget": record.budget}
        return promise | asdict(record.counts) | {"kv_tokens": live}

    def caps(self, request: VllmRequest) -> Caps | None:
        """Return the request's caps; None if it may hold its whole length."""
        footprint = self._record(request).footprint
        if not footprint.bounded or request.resumable:
            return None
        needed = footprint.slots_needed(request.num_prompt_tokens, request.num_tokens)
        own = self._blocks(needed + self.drafts.most)
        settled = self._blocks(min(request.num_tokens, footprint.decode_cap) + self.drafts.most)
        return Caps(
            own=own,
            prefill=own + self.pool.others_most(request.num_tokens),
            settled=settled + self.pool.others_settled(request.num_tokens),
        )

    def room(self, request: VllmRequest, running: Sequence[VllmRequest]) -> int | None:
        """Return the blocks to leave free when the request is admitted, so that it causes no preemption.

        A forecast from the lengths so far, not from max_tokens, because most answers end long before. A
        request without compression is admitted by vLLM's rule. Shared blocks are counted once.

        Args:
            running: running requests; within a step only new ones are added, at the end

        Returns: the growth of the running requests while the new prompt is computed; None if all of them
            together exceed the pool once their prompts are computed.
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

    def _look_ahead(self, other: VllmRequest, each: int, forecast: Forecast) -> None:
        """Add a running request, which decodes at most `each` more blocks in this time."""
        caps = self.caps(other)
        if caps is None:
            return
        held = self._held(other.request_id)
        is_prefill = other.num_computed_tokens < other.num_tokens - 1
        growth = caps.prefill - held if is_prefill else min(caps.settled - held, each)
        forecast.growth += max(0, growth)
        forecast.missing += caps.settled - held

    def most_blocks(self, num_tokens: int) -> int:
        """Return the blocks that one request of this length may hold under the engine's own settings."""
        footprint = self.options.settings.in_blocks(self.block_size).footprint(self._plain)
        needed = footprint.slots_needed(num_tokens, num_tokens) + self.drafts.most
        return self._blocks(min(needed, num_tokens)) + self.pool.others_most(num_tokens)

    def _record(self, request: VllmRequest) -> RequestAccount:
        record = self.records.get(request.request_id)
        if record is None:
            record = self.records[request.request_id] = self._open(request)
        return record

    def _open(self, request: VllmRequest) -> RequestAccount:
        """Open the record of a request. Invalid settings were refused earlier, so an error is only logged: an
        exception would end the engine."""
        params = request.sampling_params
        try:
            promise = self.options.of_request(None if params is None else params.extra_args)
            settings = self.options.of_prompt(promise, request.num_prompt_tokens, self.block_size)
        except InvalidArgumentError as error:
            logger.error("request %s is not compressed: %s", request.request_id, error)
            promise = settings = None
        if settings is None:
            return RequestAccount(None, self._plain, promise)
        settings = settings.in_blocks(self.block_size)
        window = max(1, query_window(settings.make_policy(), self.block_size))
        return RequestAccount(settings, replace(settings.footprint(self._plain), window=window), promise)

    def _held(self, request_id: str) -> int:
        """Return the blocks that a known request holds."""
        own = self.pool.places(request_id) - self.records[request_id].account.num_evicted // self.block_size
        return own + self.pool.others_held(request_id)

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)
