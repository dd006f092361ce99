"""Runs a batch of examples under one setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.stats import QueryStats
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.step.assembly import stored_facts
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.agreement import Divergence, FullRows
from kvreclaim.eval.budget import FormatStorage
from kvreclaim.eval.plan import EvalPlan, GridColumn
from kvreclaim.eval.requests import TimedAnswer, generate, score, timed_scores
from kvreclaim.eval.results import Result, cost, over
from kvreclaim.eval.task import Answer, ConversationTask, FreeTask, Item, Task, TaskScore
from kvreclaim.memory.blocks import blocks_for


class BatchRunner:
    """Runs items through one engine with the KV format `storage`. The prompts of a batch are computed once,
    and every setting finds them in the prefix cache, as far as its policy allows, which changes no result. If
    the pool has no room for them next to the running sequences, every setting starts without them.

    stats: of the model's queries; None if there are none
    first: the runner of the baseline's full cache; None: this one
    """

    def __init__(
        self,
        llm: LLM,
        plan: EvalPlan,
        storage: FormatStorage,
        stats: QueryStats | None,
        first: BatchRunner | None = None,
    ) -> None:
        self.llm = llm
        self.plan = plan
        self.storage = storage
        self.stats = stats
        self.first = first or self
        self._rows: dict[Item, FullRows] = {}
        self._sessions: dict[Item, TimedAnswer] = {}
        self._cached: frozenset[tuple[int, ...]] = frozenset()
        held = llm.engine.cache.bytes_per_block
        assert held == storage.block_bytes, f"{storage.name}: {held} bytes a block, not {storage.block_bytes}"

    def batch_size(self, task: Task, items: Sequence[Item]) -> int:
        """Examples that the pool holds even with the full cache, so that nothing is preempted."""
        if items[0].turns or isinstance(task, ConversationTask):
            return 1
        most = self._num_blocks // max(self._blocks(item.num_tokens) for item in items)
        return max(1, min(self.plan.batch_size, self.llm.engine.config.max_num_seqs, most))

    def run(self, task: Task, items: Sequence[Item], setting: GridColumn) -> list[Result]:
        """Judge every item.

        Raises: KVReclaimError if the setting cannot run here; CellError if a request failed.
        """
        configs = [self._config(item, setting) for item in items]
        answers = self._answers(task, items, configs, setting)
        outcomes = [task.judge(item, s.answer) for item, s in zip(items, answers, strict=True)]
        note = None
        if self.plan.free_running and items[0].continuation and isinstance(task, FreeTask):
            try:
                freely = generate(self.llm, items, configs, setting)
                answers, outcomes = self._run_free(task, items, freely, answers, outcomes)
            except InvalidArgumentError as error:  # e.g. a policy that needs future queries
                note = f"not run freely: {error}"
        return [self._result(*each, note) for each in zip(items, answers, outcomes, strict=True)]

    def _answers(
        self,
        task: Task,
        items: Sequence[Item],
        configs: list[CompressionConfig | None],
        setting: GridColumn,
    ) -> list[TimedAnswer]:
        if items[0].turns:
            return [self._replay(*each, setting) for each in zip(items, configs, strict=True)]
        if isinstance(task, ConversationTask):
            return [self._converse(task, *each, setting) for each in zip(items, configs, strict=True)]
        self._prepare(items)
        if not items[0].continuation:
            return generate(self.llm, items, configs, setting)
        watchers = [Divergence(rows) for rows in self.first.full_rows(items)] if task.compares else None
        return score(self.llm, items, configs, watchers, setting)

    def _config(self, item: Item, setting: GridColumn) -> CompressionConfig | None:
        """Build the compression of one sequence and try it on the model, so that unsupported settings are
        refused before anything runs."""
        config = self.plan.compression(setting, self._budget(item, setting), self.stats)
        if config is not None:
            if item.num_system:
                config = config.protecting(item.num_system, self.storage.block_size)
            self.llm.compressor(config)
        return config

    def _budget(self, item: Item, setting: GridColumn) -> int:
        """The budget of one sequence, tokens in whole blocks."""
        if setting.max_loss is not None:
            return item.num_tokens  # until the engine knows the prompt
        if setting.fraction is not None:
            return self.storage.budget_tokens(setting.fraction, item.num_tokens)
        assert setting.tokens is not None, "a budget is a share or tokens"
        protected = len(item.prompt) if self.plan.protect_prompt else 0
        return (setting.tokens + protected) // self.storage.block_size * self.storage.block_size

    def _run_free(
        self,
        task: FreeTask,
        items: Sequence[Item],
        freely: list[TimedAnswer],
        answers: list[TimedAnswer],
        outcomes: list[TaskScore],
    ) -> tuple[list[TimedAnswer], list[TaskScore]]:
        """Add the figures of free generation; speed is that of generating, memory that of scoring."""
        answers = [replace(f, metrics=s.metrics) for s, f in zip(answers, freely, strict=True)]
        outcomes = [
            replace(outcome, extra={**outcome.extra, **task.judge_free(item, f.answer)})
            for outcome, item, f in zip(outcomes, items, freely, strict=True)
        ]
        return answers, outcomes

    def _replay(self, item: Item, config: CompressionConfig | None, setting: GridColumn) -> TimedAnswer:
        """Score a session's turns one after another, from an empty prefix cache, as an agent sends them."""
        full = self.first.full_rows(item.turns, sum(len(turn.continuation) for turn in item.turns))
        self._forget()
        answers = [
            score(self.llm, [turn], [config], [Divergence(rows)], setting)[0]
            for turn, rows in zip(item.turns, full, strict=True)
        ]
        turns = [
            {**each.answer.compared, "cached": each.metrics.num_cached_tokens, "prompt": len(turn.prompt)}
            for turn, each in zip(item.turns, answers, strict=True)
        ]
        return _joined(answers, Answer(turns=tuple(turns)))

    def _converse(
        self, task: ConversationTask, item: Item, config: CompressionConfig | None, setting: GridColumn
    ) -> TimedAnswer:
        """Generate a session, and the full cache's if it is not known yet."""
        full = self.first.full_session(task, item)
        answers = full if setting == self.plan.baseline else self._session(task, item, config, setting)
        return replace(answers, answer=replace(answers.answer, full=full.answer))

    def full_session(self, task: ConversationTask, item: Item) -> TimedAnswer:
        """The full cache's session of an item, generated once."""
        if item not in self._sessions:
            self._sessions[item] = self._session(task, item, None, self.plan.baseline)
        return self._sessions[item]

    def _session(
        self, task: ConversationTask, item: Item, config: CompressionConfig | None, setting: GridColumn
    ) -> TimedAnswer:
        """Send one request after another, from an empty prefix cache."""
        self._forget()
        session, answers = task.converse(item), []
        while (request := session.request()) is not None:
            answers += generate(self.llm, [request], [config], setting)
            session.take(answers[-1].answer.text, len(request.prompt), answers[-1].metrics.num_cached_tokens)
        return _joined(answers, session.answer)

    def full_rows(self, items: Sequence[Item], num_places: int = 0) -> list[FullRows]:
        """Return the full cache's distributions, cached until other items come.

        num_places: tokens that share one example's ROW_BYTES; 0: those of each item
        """
        if any(item not in self._rows for item in items):
            vocab = self.llm.loaded.vocab_size
            self._rows = {item: FullRows(num_places or len(item.continuation), vocab) for item in items}
            self._prepare(items)
            rows = [self._rows[item] for item in items]
            first = next(setting for setting in self.plan.settings())
            timed_scores(self.llm, items, [None] * len(items), rows, first)
        return [self._rows[item] for item in items]

    def _prepare(self, items: Sequence[Item]) -> None:
        """Put the prompts into the prefix cache, or empty it. Needs twice the room: a policy's survivors are
        copied while the prompts stay."""
        prompts = frozenset(item.prompt for item in items)
        if prompts <= self._cached:
            return
        self._forget()
        if 2 * sum(self._blocks(item.num_tokens) for item in items) <= self._num_blocks:
            first = {"sparse_prefill": self.plan.sparse_prefill[0]}
            texts = [{"prompt_token_ids": list(item.prompt), **first} for item in items]
            self.llm.score(texts, [[0]] * len(items))
            self._cached = prompts

    def _forget(self) -> None:
        self.llm.engine.reset_prefix_cache()
        self._cached = frozenset()

    @property
    def _num_blocks(self) -> int:
        num_blocks = self.llm.engine.config.num_blocks
        assert num_blocks is not None, "the engine's limits are set"
        return num_blocks

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.llm.engine.config.block_size)

    def _result(self, item: Item, timed: TimedAnswer, outcome: TaskScore, note: str | None) -> Result:
        if (read := timed.metrics.prefill_share) is not None:
            outcome = replace(outcome, extra={**outcome.extra, "prefill_read": read})
        if reused := timed.metrics.num_reused_tokens:
            share = reused / timed.metrics.num_prompt_tokens
            outcome = replace(outcome, extra={**outcome.extra, "reused": share})
        metrics = timed.metrics
        length = metrics.num_prompt_tokens + (len(item.continuation) or metrics.num_generated_tokens)
        return Result(
            **asdict(outcome),
            num_tokens=item.num_tokens,
            budget=metrics.budget or item.num_tokens,
            full_blocks=self._blocks(min(length, item.num_tokens)),
            timed_tokens=timed.timed_tokens,
            elapsed_s=timed.elapsed_s,
            generated=timed.generated,
            note=note,
            **cost(metrics),
        )


def _joined(answers: Sequence[TimedAnswer], answer: Answer) -> TimedAnswer:
    """Merge the answers to a session's requests."""
    return replace(
        answers[-1],
        answer=answer,
        metrics=over([each.metrics for each in answers]),
        timed_tokens=sum(each.timed_tokens for each in answers),
        elapsed_s=sum(each.elapsed_s for each in answers),
    )


def open_runners(llm: LLM, plan: EvalPlan) -> dict[str, BatchRunner]:
    """Return a runner for each KV format of the plan, over the same weights. The caller's engine serves its
    own format if its key transform is that of the plan's statistics. Formats of two names share an engine."""
    facts, config = llm.engine.groups.facts, llm.engine.config
    stats = _load_stats(llm, plan)
    engines: dict[str, LLM] = {}
    runners: dict[str, BatchRunner] = {}
    for name in plan.formats:
        storage = FormatStorage.of(name, facts, config.block_size)
        if storage.name not in engines:
            engines[storage.name] = _in_format(llm, storage.name, None if plan.stats is None else stats)
        first = next(iter(runners.values()), None)
        runners[name] = BatchRunner(engines[storage.name], plan, storage, stats, first)
    return runners


def _in_format(llm: LLM, name: str, stats: QueryStats | None) -> LLM:
    """Return an engine with a KV format and the key transform of `stats`; None: the caller's transform."""
    form = llm.engine.kv_format
    is_own = name == form.name
    if is_own and (stats is None or stored_facts(llm.loaded, llm.engine.config, stats)[1] == form):
        return llm
    return llm.sibling(stats=stats, kv_cache_dtype=name)


def _load_stats(llm: LLM, plan: EvalPlan) -> QueryStats | None:
    """The caller's statistics, or the model's; read once for all budgets."""
    if isinstance(plan.stats, QueryStats):
        return plan.stats
    own_file = llm.stats_file
    if plan.stats is not None:
        return QueryStats.load(plan.stats)
    return QueryStats.load(own_file) if own_file.is_file() else None
