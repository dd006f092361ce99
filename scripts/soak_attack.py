"""A tenant that attacks, beside a soak: every attack that needs a key, again and again, until its input ends.
It prints what was answered with a 5xx; the last line says what it did.

    python scripts/soak_attack.py URL PID KEY OPERATOR
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

from attack_cases import TENANTS, Attack, Target

ATTACKS = [attack for attack in TENANTS if "slow" not in attack.name]
"""One that waits for the server's deadlines would hold up the others."""


def main() -> None:
    url, pid, key, operator = sys.argv[1:]
    target = Target(urlsplit(url).port or 80, int(pid), Path(), key, None, operator)
    over, answered = Event(), Counter[str]()
    Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.is_set():
        for attack in ATTACKS:
            if over.is_set():
                break
            answered.update(strike(attack, target))
            over.wait(0.2)
    print(f"{answered.total()} requests of {len(ATTACKS)} attacks: {dict(answered)}")


def strike(attack: Attack, target: Target) -> list[str]:
    """Attack once. Returns: the statuses."""
    outcomes = attack.strike(target)
    for outcome in outcomes:
        if outcome.status is not None and outcome.status >= 500:
            print(f"{attack.name}: status {outcome.status}")
    return [str(outcome.status or "closed") for outcome in outcomes]


if __name__ == "__main__":
    main()
