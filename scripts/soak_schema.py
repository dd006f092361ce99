"""Requests made from the server's own OpenAPI description, beside a soak, until its input ends: no 5xx, no
answer that it does not tell of. It prints what was wrong; the last line says what it did.

    python scripts/soak_schema.py URL PID KEY OPERATOR
"""

from __future__ import annotations

import itertools
import sys
from contextlib import suppress
from threading import Event, Thread

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis import checks as known
from schemathesis.specs.openapi import checks as openapi

CHECKS = [
    known.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
]
EXAMPLES = 20
LEAVES_S = 10.0
"""A client that asks for thousands of tokens goes then."""


def main() -> None:
    url, _, _, operator = sys.argv[1:]
    headers = {"authorization": f"Bearer {operator}"}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    operations = [found.ok() for found in schema.get_all_operations()]
    over, num_asked = Event(), 0
    Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    ways = itertools.cycle(list(itertools.product(operations, GenerationMode)))
    for operation, mode in ways:
        if over.is_set():
            break
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            nonlocal num_asked
            if over.is_set():
                return
            num_asked += 1
            with suppress(requests.Timeout):
                case.validate_response(case.call(timeout=LEAVES_S, headers=headers), checks=CHECKS)

        try:
            check()
        except Exception as error:
            print(f"{operation.label}, {mode.value}: {error}".replace("\n", " | "))
    print(f"{num_asked} requests from the description of {len(operations)} routes")


if __name__ == "__main__":
    main()
