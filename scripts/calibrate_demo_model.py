"""Calibrate a demo model on its tasks, run the trial on others, save the statistics beside its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvreclaim import LLM, demo_model
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.calibrate.trial import prose_document, try_candidates
from kvreclaim.eval.demo_tasks import DEMO_TASKS, calibration_documents
from kvreclaim.model_paths import STATS_FILE

HELD_OUT_SEED = 1_000
"""Of the first document that is tried: nothing is fitted to one of its kind."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model(), help="folder of the model")
    parser.add_argument("--tasks", nargs="+", choices=DEMO_TASKS, default=[*DEMO_TASKS])
    parser.add_argument("--documents", type=int, default=20, help="examples that evaluation never draws")
    parser.add_argument("--trial", type=int, default=8, help="more of them, to try candidates on")
    parser.add_argument("--tokens", type=int, default=2048, help="of a document")
    parser.add_argument("--centers", type=int, default=16)
    args = parser.parse_args()
    llm = LLM(args.model, num_blocks=1, max_model_len=1)
    documents = calibration_documents(args.documents, args.tokens, args.tasks)
    stats = calibrate(llm.loaded, documents, num_centers=args.centers, show_progress=True)
    tried = calibration_documents(args.trial, args.tokens, args.tasks, seed=HELD_OUT_SEED)
    trial = try_candidates(llm, stats, list(map(prose_document, tried)), show_progress=True)
    stats.with_trial(trial).save(args.model / STATS_FILE)
    print(f"{stats.metadata.num_tokens} tokens, {args.centers} centres per head: {STATS_FILE}")
    print(f"policy auto: {trial.best}")


if __name__ == "__main__":
    main()
