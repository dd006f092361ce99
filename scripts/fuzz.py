"""Random operations on the engine, checked after each step.

python scripts/fuzz.py --steps 100000        # many walks, seeds from 0 on
python scripts/fuzz.py --seed 17             # one of them again, and the shortest walk that fails so
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in (".", "engine", "engine/fuzz")]

from walk import main  # noqa: E402  (it lives with the tests)

if __name__ == "__main__":
    sys.exit(main())
