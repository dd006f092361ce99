"""A conversation with an engine: its turns, and the costs of each answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.engine.api.chat import num_system_tokens, render_chat
from kvreclaim.engine.features.snapshots.feature import rewritten
from kvreclaim.engine.request.outputs import FinishReason, RequestMetrics, RequestOutput
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.parsers.pieces import Piece, Reasoning, Text, ToolCall, merged
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.shared.output_format import output_format

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Costs of an answer, and of the conversation that it ends.

    finish_reason: "abort" if the user ended it; error: reason of a failure
    ending:        reason of the end, in words
    num_tokens:    tokens of the last prompt and the answer
    blocks_held:   blocks of the answer before its last step
    blocks_freed:  blocks freed by compression in all turns of the cache that the answer continues
    """

    metrics: RequestMetrics
    finish_reason: FinishReason | None
    ending: str
    error: str | None
    num_tokens: int
    blocks_held: int
    blocks_freed: int


class Dialogue:
    """Turns of a user and a model.

    params, compression, system: of the answers to come; they may be set at any time
    turns: messages behind the system prompt, a user's and the model's by turns
    last:  figures of the last answer; None before the first
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, compression: CompressionConfig | None, system: str = ""
    ) -> None:
        self.llm, self.params, self.compression, self.system = llm, params, compression, system
        self.form = output_format(llm.tokenizer, ServerConfig(served_model_name=(llm.loaded.name,)))
        self.turns: list[Message] = []
        self.last: AnswerFigures | None = None
        self._ids = itertools.count()

    @property
    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    @property
    def is_plain(self) -> bool:
        """Whether there is no chat template, so that the model continues the text of all turns."""
        return not self.llm.tokenizer.chat_template

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns, self.last = [], None

    def ask(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """Yield the parts of the answer to a message as they come; then `turns` has both and `last` its
        figures. An answer that failed, or has no text, is forgotten together with the message.

        stopped: called before each step; true ends the answer, and its text stays

        Raises: InvalidArgumentError, RequestTooLongError before anything has run.
        """
        message = {"role": "user", "content": text}
        request, engine = self._begin([*self.messages, message]), self.llm.engine
        splitter = self.form.splitter(request.prompt_token_ids, None, one_call=False)
        pieces: list[Piece] = []
        held = num_taken = 0

        def new() -> list[Piece]:
            nonlocal num_taken
            whole = request.output().outputs[0].text
            found = splitter.take(whole[num_taken:], last=request.finished)
            num_taken = len(whole)
            pieces.extend(found)
            return found

        try:
            while not request.finished and not stopped():
                in_use = engine.step().stats.blocks_in_use
                held = held if request.finished else in_use
                yield from new()
        finally:
            if not request.finished:
                engine.abort(request.request_id)
        yield from new()
        self._count(request.output(), held)
        self._remember(message, merged(pieces))

    def _begin(self, messages: Sequence[Message]) -> Request:
        llm, form = self.llm, self.form
        ids, config, params = self._prompt(messages), self.compression, self.params
        if config is not None and config.protect_system and not self.is_plain:
            num_system = num_system_tokens(llm.loaded, ids, messages)
            config = config.protecting(num_system, llm.engine.config.block_size)
        if form.needs_special_tokens(with_tools=False):
            params = replace(params, skip_special_tokens=False)
        spec = RequestSpec(
            request_id=f"answer-{next(self._ids)}",
            prompt_token_ids=ids,
            params=params,
            compression=config,
            may_end_early=True,
        ).having(form.thinking(ids, with_tools=False))
        if form.takes_apart(with_tools=False):
            spec = rewritten(spec)
        spec = llm.promised(spec)
        return llm.engine.add(spec, None if spec.compression is None else llm.compressor(spec.compression))

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        if not self.is_plain:
            return render_chat(self.llm.loaded, messages)
        texts = ("\n" + each["content"] if each["role"] == "user" else each["content"] for each in messages)
        return list(self.llm.tokenizer.encode("".join(texts).removeprefix("\n")))

    def _count(self, output: RequestOutput, held: int) -> None:
        metrics, [answer] = output.metrics, output.outputs
        before = 0 if self.last is None or not metrics.num_snapshot_tokens else self.last.blocks_freed
        self.last = AnswerFigures(
            metrics=metrics,
            finish_reason=answer.finish_reason,
            ending=self._ending(output),
            error=output.error,
            num_tokens=len(output.prompt_token_ids) + len(answer.token_ids),
            blocks_held=held or metrics.peak_blocks,
            blocks_freed=before + metrics.blocks_freed,
        )

    def _ending(self, output: RequestOutput) -> str:
        [answer] = output.outputs
        if answer.finish_reason != "length":
            return "interrupted" if answer.finish_reason == "abort" else str(answer.finish_reason)
        if len(answer.token_ids) == self.params.max_tokens:
            return f"cut off: max_tokens is {self.params.max_tokens:,}"
        num_tokens, limit = len(output.prompt_token_ids) + len(answer.token_ids), self.llm.engine.longest
        if num_tokens >= limit:
            return f"cut off: the context of {limit:,} tokens is full"
        return f"cut off: the pool of {self.llm.stats().memory.num_blocks:,} blocks is full"

    def _remember(self, message: Message, parts: Sequence[Piece | ToolCall]) -> None:
        assert self.last is not None, "an answer is counted before it is remembered"
        text = "".join(part.text for part in parts if isinstance(part, Text))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        if self.last.error is None and (text or thought):
            reply = {"role": "assistant", "content": text}
            self.turns += [message, reply | ({"reasoning_content": thought} if thought else {})]
