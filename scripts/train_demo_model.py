"""Train, check and save the small model that the tests, the demo and the evaluation use.

Run it bare for a model like the one that the package ships, with --resume after an interruption, and with
--check-only for the scores of the model in --out.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch
from demo_model.batches import DRAW
from demo_model.check import check
from demo_model.curriculum import LENGTHS, Curriculum
from demo_model.network import (
    CONFIGS,
    MAX_TOKENS,
    MIN_ROWS,
    STEP_TOKENS,
    Trainer,
    build_network,
    faster_dtype,
    start_from,
)
from demo_model.tokenizer import build_tokenizer
from transformers.utils.logging import disable_progress_bar

ASSETS = Path(__file__).resolve().parents[1] / "src" / "kvreclaim" / "assets" / "demo_model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REPORT_STEPS = 20
CHECKPOINT_STEPS = 100
FIRST_USABLE_LENGTH = 640  # from here on, a model on the way is worth showing


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train, check and save the demo model.")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for model and tokenizer")
    parser.add_argument("--init", type=Path, help="start from the weights of this model, smaller or as large")
    parser.add_argument("--arch", choices=CONFIGS, default="qwen3", help="llama has no QK-norm")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tasks", nargs="+", choices=DRAW, default=[*DRAW])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto: time a step of each"
    )
    parser.add_argument("--max-tokens", type=float, default=40e6, help="the end, even if not all is learned")
    parser.add_argument("--max-minutes", type=float, default=240, help="the end as well, whichever is first")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "demo_ckpt")
    parser.add_argument(
        "--num-examples", type=int, default=32, help="held-out sequences of each task's check"
    )
    parser.add_argument("--check-seed", type=int, default=0, help="seed of the first held-out sequence")
    parser.add_argument("--num-free", type=int, default=16, help="how many of them are generated freely too")
    parser.add_argument(
        "--check-tokens", type=int, default=MAX_TOKENS, help="length of the check's sequences"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--check-only", action="store_true", help="train nothing, score the model in --out")
    return parser.parse_args()


def save(trainer: Trainer, folder: Path) -> None:
    """Write model and tokenizer in the layout that the Auto classes read."""
    trainer.network.save_pretrained(folder)
    build_tokenizer(MAX_TOKENS).save_pretrained(folder, save_jinja_files=False)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes for the owner alone; a wheel would carry that along


def build_trainer(args: argparse.Namespace) -> Trainer:
    """Return a trainer at its start."""
    torch.manual_seed(args.seed)
    network = build_network(args.arch, args.layers)
    if args.init:
        start_from(network, args.init)
    return Trainer(network, DTYPES[args.dtype] if args.dtype in DTYPES else faster_dtype(network))


def train(args: argparse.Namespace) -> float:
    """Run the curriculum to its end, save to `args.out` and return the training time in seconds."""
    trainer = build_trainer(args)
    curriculum, rng = Curriculum(args.tasks), random.Random(args.seed)
    elapsed_s, num_tokens_seen = 0.0, 0
    state_file = args.checkpoints / "state.pt"
    if args.resume:
        state = torch.load(state_file, weights_only=True)
        trainer.load_state_dict(state["trainer"])
        curriculum = Curriculum.from_state_dict(state["curriculum"])
        elapsed_s, num_tokens_seen = state["elapsed_s"], state["tokens"]
        rng.setstate(state["rng"])
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic() - elapsed_s
    while not curriculum.finished:
        num_tokens = curriculum.draw_length(rng)
        tasks = curriculum.draw_tasks(rng, max(MIN_ROWS, STEP_TOKENS // num_tokens))
        right = trainer.step(rng, tasks, num_tokens, curriculum.lr_scale())
        num_tokens_seen += len(tasks) * num_tokens
        elapsed_s = time.monotonic() - begin_s
        used = max(num_tokens_seen / args.max_tokens, elapsed_s / 60 / args.max_minutes)
        advanced = curriculum.record(num_tokens, right, used)
        if advanced and LENGTHS[curriculum.stage - 1] >= FIRST_USABLE_LENGTH:
            save(trainer, args.out)
        if curriculum.step % REPORT_STEPS == 0 or advanced:
            report(curriculum, elapsed_s, num_tokens_seen)
        if curriculum.step % CHECKPOINT_STEPS == 0 or advanced:
            state = {"trainer": trainer.state_dict(), "rng": rng.getstate()}
            state["curriculum"] = curriculum.state_dict()
            torch.save(state | {"elapsed_s": elapsed_s, "tokens": num_tokens_seen}, state_file)
    save(trainer, args.out)
    return elapsed_s


def report(curriculum: Curriculum, elapsed_s: float, num_tokens_seen: int) -> None:
    """Print a line of progress and, for each task, how it does at the present length."""
    print(
        f"step {curriculum.step} length {curriculum.num_tokens} rate {curriculum.lr_scale():.2f} "
        f"{elapsed_s:.0f} s {num_tokens_seen / 1e6:.2f} M tokens {curriculum.used:.0%} of the budget"
    )
    for task in curriculum.tasks:
        shares = {kind: share for (name, kind), share in curriculum.smoothed.items() if name == task}
        print(f"  {task:18}" + " ".join(f"{k.value} {shares[k]:.3f}" for k in sorted(shares, key=str)))
    print(flush=True, end="")


def main() -> None:
    """Train unless told not to, then check what was saved."""
    args = parse_arguments()
    disable_progress_bar()
    if not args.check_only:
        print(f"trained in {train(args):.0f} s")
    for task in args.tasks:
        num_free = min(args.num_free, args.num_examples)
        scores = check(args.out, task, args.check_tokens, args.num_examples, num_free, args.check_seed)
        print(f"{task:18}" + " ".join(f"{name} {score:g}" for name, score in scores.items()), flush=True)


if __name__ == "__main__":
    main()
