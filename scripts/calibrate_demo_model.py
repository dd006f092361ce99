"""Measure a demo model's queries on its own tasks and put the statistics beside its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvreclaim import demo_model
from kvreclaim.engine.face.calibration import calibrate
from kvreclaim.engine.face.llm import STATS_FILE
from kvreclaim.eval.demo_tasks import DEMO_TASKS, LEARNED_TASKS, calibration_documents
from kvreclaim.model.loader import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model(), help="folder of the model")
    parser.add_argument("--tasks", nargs="+", choices=DEMO_TASKS, default=LEARNED_TASKS)
    parser.add_argument("--documents", type=int, default=20, help="examples that evaluation never draws")
    parser.add_argument("--tokens", type=int, default=2048, help="of a document")
    parser.add_argument("--centers", type=int, default=16)
    args = parser.parse_args()
    stats = calibrate(
        load_model(args.model),
        calibration_documents(args.documents, args.tokens, args.tasks),
        num_centers=args.centers,
        show_progress=True,
    )
    stats.save(args.model / STATS_FILE)
    print(f"{stats.metadata.num_tokens} tokens, {args.centers} centres per head: {STATS_FILE}")


if __name__ == "__main__":
    main()
