"""What goes on beside a soak until its input ends; it prints what was wrong, then what it did.

python tests/soak/beside.py attack PORT PID   # every attack that needs a key, again and again: no 5xx
python tests/soak/beside.py schema PORT PID   # requests made from the server's own OpenAPI description:
                                              # no 5xx, no answer that it does not tell of
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from attacks import TENANTS
from grammar_attacks import STRUCTURED
from server import OPERATOR, Target

EXAMPLES = 20
LEAVES_S = 10.0
"""A client of thousands of tokens goes then."""


def attack(target: Target, over: Event) -> str:
    """One that waits for the server's deadlines would hold up the others."""
    attacks, answered = [each for each in [*TENANTS, *STRUCTURED] if "slow" not in each.name], Counter[str]()
    for each in itertools.cycle(attacks):
        if over.wait(0.2):
            break
        for outcome in each.strike(target):
            answered[str(outcome.status or "closed")] += 1
            if (outcome.status or 0) >= 500 and outcome.status not in each.expected:
                print(f"{each.name}: status {outcome.status}")
    return f"{answered.total()} requests of {len(attacks)} attacks: {dict(answered)}"


def schema(target: Target, over: Event) -> str:
    import requests
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis import GenerationMode
    from schemathesis import checks as known
    from schemathesis.specs.openapi import checks as openapi

    checks = [
        known.not_a_server_error,
        openapi.status_code_conformance,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
    ]
    headers, num_requests = {"authorization": f"Bearer {OPERATOR}"}, 0
    url = f"http://127.0.0.1:{target.port}/openapi.json"
    found = schemathesis.openapi.from_url(url, headers=headers)
    operations = [each.ok() for each in found.get_all_operations()]
    for operation, mode in itertools.cycle(itertools.product(operations, GenerationMode)):
        if over.is_set():
            break
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            nonlocal num_requests
            if over.is_set():
                return
            num_requests += 1
            with suppress(requests.Timeout):
                case.validate_response(case.call(timeout=LEAVES_S, headers=headers), checks=checks)

        try:
            check()
        except Exception as error:
            print(f"{operation.label}, {mode.value}: {error}".replace("\n", " | "))
    return f"{num_requests} requests from the description of {len(operations)} routes"


if __name__ == "__main__":
    what, port, pid = sys.argv[1:]
    ended = Event()
    Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print({"attack": attack, "schema": schema}[what](Target(int(port), int(pid), Path()), ended))
