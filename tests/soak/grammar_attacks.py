"""What grammars, tools and stored responses can be made to cost: refused, or bounded in time and memory."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from attacks import CHAT, COMPLETIONS, MESSAGES, USER, Attack, Strike, filled, posting, submit, timed
from client import exchange, head, post, request_body, status
from server import ATTACKER, MODEL, Target

RESPONSES = "/v1/responses"
ITEMS = f'{{"model":"{MODEL}","max_output_tokens":1,"truncation":"auto","input":['
MOST_STORED = 8
TEXT = "lark shell dew mole nest " * 300
BOUNDED: dict[str, Any] = {"expected": (200, 400, 413, 500), "refused": False, "growth": 256 << 20}
"""500: a grammar that costs too much to follow ends its own request."""


def doubling(depth: int) -> dict[str, Any]:
    """A schema each of whose definitions names the next one twice: 2 ** depth ways."""
    both = {"anyOf": [{"$ref": "#/$defs/a%d"}, {"type": "array", "items": {"$ref": "#/$defs/a%d"}}]}
    defs = {f"a{n}": json.loads(json.dumps(both).replace("%d", str(n + 1))) for n in range(depth)}
    return {"$defs": {**defs, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def required(count: int) -> dict[str, Any]:
    schema = wide(count)
    return {**schema, "required": [*schema["properties"]], "additionalProperties": False}


ALL_OF = {"allOf": [{"type": "object", "properties": {f"p{n}": {"minLength": n}}} for n in range(2000)]}
SCHEMAS: dict[str, Any] = {
    "a schema that doubles": doubling(60),
    "a schema of 10,000 properties": wide(10_000),
    "a schema of 8,000 required properties": required(8_000),
    "a schema 50 deep": nested(50),
    "a schema 5,000 deep": None,
    "allOf of 2,000": ALL_OF,
    "a text of 10**9 characters at least": {"type": "string", "minLength": 10**9},
    "an array of 10**9 numbers": {"type": "array", "items": {"type": "number"}, "minItems": 10**9},
    "an enum of 30,000": {"enum": [f"value {n}" for n in range(30_000)]},
    "a pattern that backtracks": {"type": "string", "pattern": "^(a+)+(a|aa)*(a*)*$"},
    "a pattern that repeats": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "a definition that is itself": {"$ref": "#"},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "a regex that backtracks": {"regex": "(a|a)*(a+)+(a|aa)+" * 50 + "b"},
    "a regex that repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a regex of all scripts": {"regex": r"[\p{L}\p{N}]{1,5000}" * 20},
    "a choice of 20,000": {"choice": [f"choice {n}" for n in range(20_000)]},
    "a grammar that is ambiguous": {"grammar": 'start: start start start | "a" | '},
    "a grammar of 5,000 rules": {"grammar": "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(5000))},
}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": wide(10_000)}}
TOOL = {"name": "f", "input_schema": wide(10_000)}
FLAT = [{"type": "function", "name": f"f{n}", "parameters": wide(8)} for n in range(1000)]
WRONG = [{**each, "parameters": {"not": {}}} for each in FLAT]
MANY = [{"type": "function", "function": {"name": f"f{n}", "parameters": wide(8)}} for n in range(1000)]


def deep(depth: int) -> bytes:
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    whole = json.dumps({"structured_outputs": {"json": "SCHEMA"}, "prompt": "a", "model": "kvreclaim-demo"})
    return whole.replace('"SCHEMA"', schema).encode()


def schema_attack(name: str, schema: Any) -> Attack:
    if schema is None:
        return Attack(name, posting(COMPLETIONS, partial(deep, 5000)))
    fields = {"structured_outputs": {"json": schema}, "prompt": "a", "max_tokens": 32}
    return Attack(name, submit(COMPLETIONS, **fields), **BOUNDED)


def storing(target: Target) -> bytes:
    """Return the answer to a request whose response is stored."""
    body = request_body(input=TEXT, max_output_tokens=1)
    sent = post(RESPONSES, target.key(ATTACKER), body, connection="close")
    return exchange(target.port, sent, whole=True)


def latest_alone(target: Target) -> list[str]:
    """Check that only the latest of the stored responses are there."""
    responses = [storing(target).decode() for _ in range(MOST_STORED + 4)]
    ids = [re.findall(r'"id":"(resp_[\w-]+)"', each)[0] for each in responses]
    gets = [head("GET", f"{RESPONSES}/{each}", target.key(ATTACKER)) for each in ids]
    found = [status(exchange(target.port, get)) for get in gets]
    return [] if found == [404] * 4 + [200] * MOST_STORED else [f"of those stored there are {found}"]


def chatting(**fields: Any) -> Strike:
    return submit(CHAT, messages=USER, max_tokens=8, **fields)


STRUCTURED = [
    *(schema_attack(name, schema) for name, schema in SCHEMAS.items()),
    *(
        Attack(
            name,
            submit(COMPLETIONS, prompt="a", max_tokens=32, structured_outputs=given),
            **BOUNDED,
        )
        for name, given in GRAMMARS.items()
    ),
    Attack("a function of 10,000 parameters", chatting(tools=[FUNCTION]), **BOUNDED),
    Attack("the same, forced", chatting(tools=[FUNCTION], tool_choice="required"), **BOUNDED),
    Attack("1,000 functions, forced", chatting(tools=MANY, tool_choice="required"), **BOUNDED),
    *(
        Attack(f"1,000 functions {kind} be strict", submit(RESPONSES, input="a", tools=tools), **BOUNDED)
        for kind, tools in (("that may", FLAT), ("of which none can", WRONG))
    ),
    Attack(
        "truncation of 4,000 items",
        posting(RESPONSES, partial(filled, ITEMS, '{"role":"user","content":""}', "]}", 30 * 4000)),
        **BOUNDED,
    ),
    Attack(
        "a tool of 10,000 parameters", submit(MESSAGES, messages=USER, max_tokens=8, tools=[TOOL]), **BOUNDED
    ),
]
STORED = Attack(
    "responses stored without end",
    lambda target: [timed(lambda: storing(target))],
    (200,),
    refused=False,
    growth=64 << 20,
    check=latest_alone,
)
