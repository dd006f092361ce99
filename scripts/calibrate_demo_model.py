"""Measure the demo model's queries on its own task and ship the statistics beside its weights."""

from __future__ import annotations

import argparse

from kvreclaim import demo_model
from kvreclaim.engine.calibration import calibrate
from kvreclaim.engine.llm import STATS_FILE
from kvreclaim.eval.chain import calibration_documents
from kvreclaim.model.loader import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=16, help="examples that evaluation never draws")
    parser.add_argument("--centers", type=int, default=16)
    args = parser.parse_args()
    directory = demo_model()
    stats = calibrate(
        load_model(directory),
        calibration_documents(args.documents),
        num_centers=args.centers,
        show_progress=True,
    )
    stats.save(directory / STATS_FILE)
    print(f"{stats.metadata.num_tokens} tokens, {args.centers} centres per head: {STATS_FILE}")


if __name__ == "__main__":
    main()
