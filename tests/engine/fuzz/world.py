"""An engine under fuzz: operations in, everything checked after each step, answers compared in the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from alone import GRAMMARS, LOGPROB, Answer, Oracle, Question, follows
from chunk_shadow import shadow_logits
from lean import GUILTY, POISON
from machine import Brittle as BrittlePolicy
from machine import Machine
from operations import Abort, Ask, Brittle, NotFinite, Operation, Raise, Reset, Setup, Step
from prefill_shadow import PrefillShadow

from kvreclaim.chunks import ChunkReuse, Chunks
from kvreclaim.engine.attend.chunks import expanded
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.step.engine import Engine
from kvreclaim.errors import KVReclaimError
from kvreclaim.memory.pins import Retention

MOST_STEPS_TO_DRAIN = 3000
MOST_TOKENS = 60
OFF = 1e-5
"""Most that an attention may be off, as in every test with a shadow."""
COMPRESSION = ("policy", "budget", "interval", "sinks", "compress_prompt_at", "salt")
"""Fields of an Ask that the turns of a conversation have in common."""
OFF_NATIVE = 1e-4
"""The same of native kernels over codes."""


@dataclass
class FuzzedRequest:
    """A request that the engine took. may_fail: why it may end with an error."""

    ask: Ask
    question: Question
    request: Request
    may_fail: str | None = None


@dataclass
class World:
    """One engine. problems are raised as AssertionError. harmed: something has been made to go wrong that may
    cost drafts. gone_on: requests that began with what earlier turns had kept: only attention is compared."""

    machine: Machine
    setup: Setup
    added: list[FuzzedRequest] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    harmed: bool = False
    gone_on: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.llm = self.machine.engine(self.setup)
        self.engine = self.llm.engine
        self.faults = self.machine.faults
        self.faults.clear()
        BrittlePolicy.armed[0] = False
        self.by_id: dict[str, FuzzedRequest] = {}
        self.shadow: Any = None
        if self.setup.shadow:
            self.shadow = PrefillShadow(self.llm, self.patch)
        self._watch()

    def _watch(self) -> None:
        """Note the requests of a pass in which something was made to go wrong."""
        forward = self.engine.runner.forward

        def watched(step, *, observed=True):
            self.faults.fired = None
            try:
                return forward(step, observed=observed)
            finally:
                if not observed:
                    self.harmed |= self.faults.fired is not None
                    self.faults.fired = None
                self._blame(step, self.faults.fired)

        self.patch.setattr(self.engine.runner, "forward", watched)
        begin = self.engine.scheduler.snapshots.begin

        def watched_begin(snapshot, seq):
            if seq.lineage is not None:
                self.gone_on.add(seq.request_id)
            begin(snapshot, seq)

        self.patch.setattr(self.engine.scheduler.snapshots, "begin", watched_begin)

    def _blame(self, step, fired) -> None:
        if fired is None:
            return
        self.counts["fired " + ("raise" if fired == "raised" else "NaN")] += 1
        first = 0
        for run in expanded(step):
            rows = range(first, first + run.num_tokens)
            first = rows.stop
            alone = fired == "raised" and len(step) == 1
            if alone or (fired != "raised" and set(rows) & set(fired)):
                request = run.seq.request
                name = (request.parent or request).request_id
                self.by_id[name].may_fail = "its pass was made to fail"

    def do(self, operation: Operation) -> None:
        self.harmed |= isinstance(operation, Raise | NotFinite | Brittle)
        match operation:
            case Ask():
                self.ask(operation)
            case Abort(which):
                if live := list(self.engine.requests):
                    self.engine.abort(live[which % len(live)])
                    self.check()
            case Raise(times):
                self.faults.raises = times
            case NotFinite(rows):
                self.faults.not_finite = rows if self._keeps_nan else "all"
            case Brittle():
                BrittlePolicy.armed[0] = True
            case Reset():
                self.engine.memory.reset_prefix_cache()
                self.check()
            case Step(times):
                for _ in range(times):
                    self.step()

    def ask(self, ask: Ask) -> None:
        ask, prompt = self._begun(ask)
        question = self.machine.question(ask, prompt, self.setup)
        served = self.shadow is None and self.setup.prefix_caching and not self.setup.windows
        chunks = chunks_of(ask, len(prompt)) if served else None
        name = f"r{len(self.added)}"
        try:
            request = self.engine.add_request(
                name,
                prompt,
                question.params(),
                self.machine.compressor(self.llm, question),
                continuation=list(question.continuation) or None,
                priority=ask.priority if self.setup.scheduling_policy != "fcfs" else 0,
                retention=(Retention(ask.retention, 3600.0),) if ask.retention else (),
                tenant=ask.tenant,
                compress_prompt_at=question.compress_prompt_at,
                cache_salt=question.salt,
                is_rewritten=self.setup.conversations and ask.seed == 1,
                sparse_prefill=question.sparse,
                drop_spans=question.drop_spans,
                drop_at=question.drop_at,
                options=[each for each in (chunks, question.beams) if each is not None],
            )
        except KVReclaimError:
            self.counts["refused"] += 1
            return
        fuzzed = FuzzedRequest(ask, question, request)
        if GUILTY in prompt or POISON in prompt:
            self.harmed = True
            fuzzed.may_fail = "it holds a token that breaks things"
        elif ask.policy == "brittle":
            self.harmed = True
            fuzzed.may_fail = "its policy may raise"
        self.added.append(fuzzed)
        self.by_id[name] = fuzzed
        self.counts["added"] += 1

    def _begun(self, ask: Ask) -> tuple[Ask, list[int]]:
        """The operation with its fields filled in, and its prompt."""
        ended = [turn for turn in self.added if turn.request.finished and turn.request.error is None]
        if ask.turn_of is not None and ended:
            before = ended[-1 - ask.turn_of % len(ended)]
            prompt = before.request.sequences[0].token_ids[:MOST_TOKENS]
            if ask.goes_on and self.setup.conversations:
                ask = replace(ask, **{name: getattr(before.ask, name) for name in COMPRESSION})
        else:
            prompt = list(self.machine.texts[ask.text][: ask.cut])
        tail = list(ask.tail)
        if ask.fault == "guilty" or (ask.fault == "poison" and self._keeps_nan):
            tail[len(tail) // 2 : len(tail) // 2] = [GUILTY if ask.fault == "guilty" else POISON]
        return ask, prompt + tail

    @property
    def _keeps_nan(self) -> bool:
        """Codes make 0 of NaN (docs/formats.md), so a token that is NaN spoils no other."""
        return self.setup.kv_format in ("fp32", "bf16", "fp16")

    def step(self) -> None:
        if not self.engine.has_unfinished:
            return
        self.engine.step()
        self.counts["steps"] += 1
        self.check()
        late = [seq.seq_id for seq in self.engine.scheduler.running if seq.is_due]
        assert not late, f"sequences {late} are due, and were not compressed"

    def check(self) -> None:
        """Check what must hold between any two steps."""
        self.engine.memory.check()
        for fuzzed in self.added:
            error = fuzzed.request.error
            chosen_anew = fuzzed.request.reuse is not None and self.harmed  # by a pass that may fail
            if error is not None and fuzzed.may_fail is None and not chosen_anew:
                raise AssertionError(f"{fuzzed.request.request_id} failed: {error}; {fuzzed.question}")
        if self.shadow is None:
            return
        assert not self.shadow.wrong, self.shadow.wrong[0]
        most = OFF if self.setup.kernels == "reference" else OFF_NATIVE
        assert self.shadow.worst <= most, f"an attention is off by {self.shadow.worst:.2e}"

    def finish(self, oracle: Oracle) -> None:
        """Run to the end; then nothing may be left, and every answer must be as alone."""
        for _ in range(MOST_STEPS_TO_DRAIN):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, f"{list(self.engine.requests)} never end"
        self._check_empty()
        if self.shadow is not None:
            self.counts["hits seen"] += self.shadow.num_hits
            self.counts["attention calls"] += self.shadow.num_calls
            self.counts["sparse tiles"] += getattr(self.shadow, "prefill_tiles", 0)
        self.close()
        for fuzzed in self.added:
            self._check_guilty(fuzzed)
            self._check_grammar(fuzzed)
        comparable = [fuzzed for fuzzed in self.added if self._is_comparable(fuzzed)]
        for fuzzed in comparable:
            if fuzzed.request.reuse is not None:
                self._check_reuse(fuzzed)
        comparable = [fuzzed for fuzzed in comparable if fuzzed.request.reuse is None]
        oracle.learn(fuzzed.question for fuzzed in comparable)
        for fuzzed in comparable:
            self._check_answer(fuzzed, oracle)
        totals = self.engine.totals
        if self.engine.groups.windows:
            self.counts["steps of groups"] += totals.steps
            self.counts["hit tokens of groups"] += self.engine.memory.stats().prefix_hit_tokens
        assert self.harmed or not totals.speculation.num_failed, (
            "drafting failed, and nothing was made to fail"
        )
        verified = [fuzzed.request.verify for fuzzed in self.added if fuzzed.request.verify is not None]
        self.counts["verifications"] += sum(each.num_rounds for each in verified)
        self.counts["verified drafts"] += sum(each.num_accepted for each in verified)
        self.counts["drafted"] += totals.speculation.num_draft_tokens
        self.counts["accepted"] += totals.speculation.num_accepted_tokens
        self.counts["dropped tokens"] += sum(
            fuzzed.request.collect_metrics().num_dropped_tokens for fuzzed in self.added
        )
        self.counts["preemptions"] += totals.num_preemptions
        self.counts["swaps"] += totals.swaps
        if (tiers := self.engine.tier_stats()) is not None and tiers.states is not None:
            self.counts["states to the host"] += tiers.states.stored
            self.counts["states from the host"] += tiers.states.loaded
            self.counts["copies of states that failed"] += tiers.states.failed
        self.counts["waits for others"] += self.engine.scheduler.in_flight.num_waits
        self.counts["fairness"] += totals.preemptions["fairness"]
        self.counts["passes"] += totals.compactions
        self.counts["hit tokens"] += self.engine.memory.stats().prefix_hit_tokens
        self.counts["searches"] += sum(fuzzed.question.kind == "beams" for fuzzed in self.added)
        self.counts["copies"] += self.engine.memory.stats().cow_copies
        self.counts["errors"] += sum(fuzzed.request.error is not None for fuzzed in self.added)

    def close(self) -> None:
        self.llm.close()
        self.patch.undo()
        self.faults.clear()

    def _check_empty(self) -> None:
        self.counts["turns gone on"] += len(self.gone_on)
        self.counts["snapshots begun with"] += self.engine.scheduler.snapshots.num_hits
        self.engine.reset_prefix_cache()
        self.engine.step()
        stats = self.engine.memory.stats()
        assert stats.in_use == 0, f"{stats.in_use} blocks are still in use"
        assert stats.free + stats.cached == stats.num_blocks
        assert num_signal_rows(self.engine) == 0, "rows of signals are left"

    def _check_guilty(self, fuzzed: FuzzedRequest) -> None:
        if GUILTY in fuzzed.question.prompt:
            reasons = {seq.finish_reason for seq in fuzzed.request.sequences}
            assert reasons <= {"error", "abort"}, f"{fuzzed.request.request_id} is guilty and ended {reasons}"

    def _check_grammar(self, fuzzed: FuzzedRequest) -> None:
        limits = fuzzed.question.limits
        if limits not in GRAMMARS:
            return
        for tokens in Answer.of(fuzzed.request).tokens:
            assert follows(limits, tokens), f"{fuzzed.request.request_id} breaks {limits}: {tokens}"
            self.counts["tokens of grammars"] += len(tokens)

    def _is_comparable(self, fuzzed: FuzzedRequest) -> bool:
        """Whether the answer is promised to be that of the request alone, as far as it goes. A cache that
        rounds is not: where a number lies between two codes, company decides (docs/formats.md). Nor is one
        whose windows hold all tokens, for the host's sake: alone, they have tables of their own, and other
        layers choose what is evicted."""
        special = {GUILTY, POISON} & set(fuzzed.question.prompt)
        in_one_table = bool(self.setup.windows and self.setup.host_slots and fuzzed.question.policy)
        promised = not special and not in_one_table
        promised = promised and fuzzed.request.request_id not in self.gone_on
        return self.setup.kv_format == "fp32" and promised

    def _check_reuse(self, fuzzed: FuzzedRequest) -> None:
        """Every token as likely as where chunks were computed alone and the rest behind; if what was reused
        is known, and nothing of it was compressed."""
        request, question = fuzzed.request, fuzzed.question
        reuse, metrics = request.reuse, request.collect_metrics()
        changed = metrics.num_gone_tokens and metrics.preemptions
        if question.policy is not None or question.kind == "beams" or changed or not request.prompt_done:
            return
        self.counts["reused tokens"] += metrics.num_reused_tokens
        got = Answer.of(request)
        model = self.llm.loaded.model
        for tokens, logprobs in zip(got.tokens, got.logprobs, strict=True):
            given = question.continuation[: len(tokens)] or tokens
            ids = [*question.prompt, *given]
            logits = shadow_logits(model, ids, reuse.sources, reuse.anew)[-len(given) - 1 : -1]
            wanted = logits.log_softmax(-1)[range(len(given)), list(given)].tolist()
            off = max((abs(a - b) for a, b in zip(logprobs, wanted, strict=True)), default=0)
            assert off <= LOGPROB, f"{request.request_id} is off by {off:.1e}: {question}, {reuse}"

    def _check_answer(self, fuzzed: FuzzedRequest, oracle: Oracle) -> None:
        got = Answer.of(fuzzed.request)
        self.counts["compared"] += 1
        if not oracle.gives(fuzzed.question, got):
            alone = oracle.alone(fuzzed.question)
            raise AssertionError(
                f"{fuzzed.request.request_id} is not answered as alone: {fuzzed.question}\n"
                f"  got   {got}\n  alone {alone}"
            )


def chunks_of(ask: Ask, num_prompt: int) -> Chunks | None:
    """Two chunks of a prompt, behind a head or not."""
    if ask.reuse is None or num_prompt < 4:
        return None
    head = (0, 3)[ask.cut % 2]
    cut, end = (head + num_prompt) // 2, num_prompt - 1 - len(ask.tail) // 2
    spans = tuple(span for span in ((head, cut), (cut, end)) if span[0] < span[1])
    return Chunks(spans, ChunkReuse(select=ask.reuse, share=(0.2, 0.6)[ask.seed], first=1, lead=2))


def num_signal_rows(engine: Engine) -> int:
    """Rows of all sequences in all stores of the engine's signals."""
    signals = engine.signals
    stores = (*signals._queries.values(), signals._mass, signals.digests)
    return sum(len(store._rows) for store in stores) + len(signals.passes.kept)
