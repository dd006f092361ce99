"""Constraints on an answer: forced and strict calls and structured outputs as one grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.arguments import Callee
from kvreclaim.parsers.formats import holds_name
from kvreclaim.parsers.grammars import Calls, answer_grammar
from kvreclaim.parsers.lark import Lark
from kvreclaim.parsers.thinking import ThinkSpan
from kvreclaim.refusals import Feature
from kvreclaim.server.base.errors import ApiError, refuse_fields
from kvreclaim.server.shared.output_format import OutputFormat
from kvreclaim.server.shared.service import Service
from kvreclaim.structured_outputs import AnswerGrammar, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as a request defines it.

    place: of its schema
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool
    place: str


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The functions that an answer may call.

    forced:   the answer consists of calls
    one_call: at most one
    field:    the field by which calls follow a grammar; None: no grammar
    """

    tools: Sequence[Tool]
    forced: bool = False
    one_call: bool = False
    field: str | None = None

    def calls(self, form: str) -> Calls:
        """Return the possible calls; only forced or strict arguments are constrained. Raises: ApiError."""
        try:
            functions = [
                Callee(each.name, each.schema if self.forced or each.strict else {}, each.place)
                for each in self.tools
            ]
        except InvalidArgumentError as error:
            raise ApiError(400, str(error), error.field) from error
        return Calls(form, functions, forced=self.forced, one_call=self.one_call)


def format_of(offer: ToolOffer | None, form: OutputFormat) -> OutputFormat:
    """Return the format of the answer's calls. form: of the model"""
    return form.forcing() if offer is not None and offer.forced else form


def check_grammars(service: Service, field: str) -> None:
    """Raises: ApiError if answers of this model cannot follow a grammar, which the field requires."""
    on = {Feature.STRUCTURED_OUTPUTS: True, Feature.NO_END: not service.engine.served.has_end}
    refuse_fields(on | {Feature.NO_TOKENIZER: not service.follows_grammars}, field)


def check_offer(offer: ToolOffer, form: OutputFormat, service: Service) -> None:
    """Raises: ApiError if this model's format cannot express a tool's name, or calls in it cannot follow a
    grammar."""
    if offer.field is None:
        _check_names(offer, form.tool_parser)
        return
    if form.tool_parser is None:
        raise ApiError(
            400,
            f"{offer.field} needs a format of calls, and this model's chat template shows none that is "
            "known here; leave it out, or start the server with --tool-call-parser.",
            offer.field,
        )
    check_grammars(service, offer.field)
    calls = replace(offer.calls(form.tool_parser), forced=True, one_call=True)
    reason = _reason_against(calls, form) if calls.functions else None
    while reason is not None and len(calls.functions) > 1:  # by halves, for each grammar takes its time
        middle = len(calls.functions) // 2
        half, rest = (
            replace(calls, functions=part) for part in (calls.functions[:middle], calls.functions[middle:])
        )
        first = _reason_against(half, form)
        calls, reason = (rest, _reason_against(rest, form)) if first is None else (half, first)
    if reason is not None:
        place = calls.functions[0].place
        raise ApiError(400, f"{place} cannot be followed: {reason}; change it.", place)


def _check_names(offer: ToolOffer, tool_parser: str | None) -> None:
    """Raises: ApiError for a name that calls in this format cannot have."""
    for each in offer.tools:
        if tool_parser is not None and not holds_name(tool_parser, each.name):
            field = f"{each.place.rpartition('.')[0]}.name"
            raise ApiError(
                400,
                f"{field} is {each.name[:80]!r}, which calls in this model's format, {tool_parser}, cannot "
                "hold; rename it with at most 128 letters, digits, _, . and -.",
                field,
            )


def can_follow(tools: Sequence[Tool], form: OutputFormat, service: Service) -> bool:
    """Whether an answer that may call these can be constrained to the schemas of the strict ones."""
    if form.tool_parser is None or not service.follows_grammars:
        return False
    try:
        return _reason_against(ToolOffer(tools).calls(form.tool_parser), form) is None
    except ApiError:
        return False


def _reason_against(calls: Calls, form: OutputFormat) -> str | None:
    """Return why answers with these calls cannot follow a grammar; None: they can. Raises: ApiError."""
    from kvreclaim.engine.features.structured_outputs.grammar import composed, reason_against

    try:
        lark = answer_grammar(Lark({}), calls, None, harmony=form.is_harmony, structured=False)
        return reason_against(composed(lark, None))
    except InvalidArgumentError as error:
        raise ApiError(400, str(error), error.field or calls.functions[0].place) from error


def check_unique(names: Sequence[str]) -> None:
    """Raises: ApiError if two tools have the same name."""
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ApiError(400, f"tools holds {twice[:80]!r} twice; names of tools are unique.", "tools")


def with_grammar(
    form: OutputFormat,
    offer: ToolOffer | None,
    structured: StructuredOutputsParams | None,
    prompt: RequestSpec,
    *,
    continues: bool,
) -> RequestSpec:
    """Attach the grammar of the answers and the span of their reasoning to a prompt.

    structured: for the answer after its reasoning, or instead of calls
    continues:  the prompt ends within the answer

    Raises: ApiError.
    """
    ids, params = prompt.prompt_token_ids, prompt.params
    span = form.thinking(ids, with_tools=offer is not None)
    may_think = span is not None and (span.begun or not (continues or span.over))
    field = None if offer is None else offer.field
    if structured is None and field is None:
        return prompt.having(span)
    budget = {Feature.THINKING_BUDGET: params.thinking_token_budget is not None}
    calls = None if offer is None or form.tool_parser is None else offer.calls(form.tool_parser)
    if form.is_harmony and continues:
        refuse_fields({Feature.STRUCTURED_OUTPUTS: field, Feature.CONTINUED: True}, field)
        calls, may_think = None, False
    if calls is None and not may_think:
        refuse_fields(
            budget | {Feature.NO_REASONING: "an answer that has no reasoning, for it is structured"}
        )
        return replace(prompt, params=replace(params, structured_outputs=structured))
    if params.skip_special_tokens and form.needs_special_tokens(with_tools=calls is not None):
        raise ApiError(
            400,
            "skip_special_tokens can hide where a call or reasoning ends; leave it out.",
            "skip_special_tokens",
        )
    if form.is_harmony and calls is not None and calls.forced:
        refuse_fields(budget | {Feature.NO_REASONING: "a forced call in the format harmony"})
    whole = _grammar(form, calls, span if may_think and not form.is_harmony else None, structured)
    prompt = replace(prompt, params=replace(params, structured_outputs=whole))
    return prompt.having(span if may_think else None)


def is_structured_only(prompt: RequestSpec) -> bool:
    """Whether an answer is nothing but a structured output."""
    given = prompt.params.structured_outputs
    return given is not None and not isinstance(given, AnswerGrammar)


def _grammar(
    form: OutputFormat,
    calls: Calls | None,
    span: ThinkSpan | None,
    structured: StructuredOutputsParams | None,
) -> AnswerGrammar:
    from kvreclaim.engine.features.structured_outputs.grammar import composed

    try:
        lark = answer_grammar(
            Lark(form.unwritten), calls, span, harmony=form.is_harmony, structured=structured is not None
        )
        return composed(lark, None if calls is not None and calls.forced else structured)
    except InvalidArgumentError as error:
        raise ApiError(400, str(error), "tools") from error
