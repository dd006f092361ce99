"""The tables of `kvreclaim calibrate`: the trial and the loss curve of a statistics file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvreclaim.compression.loss_curve import LossCurve
    from kvreclaim.compression.stats import QueryStats
    from kvreclaim.compression.trial import Trial

SHOWN_LOSSES = (0.01, 0.02, 0.05)
SHOWN_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75)
_COLUMNS = (
    "cont, {}: nats per token above the full cache on a document's continuation and on {}; right: correct "
    "tokens of the latter, relative to the full cache; loss: both, mean over budgets"
)
_JUDGED = {"asked": "answers to questions", "again": "repeated parts"}


def show_statistics(console: Console, stats: QueryStats) -> None:
    """Print the parts of a statistics file, its trial and its loss curve."""
    found = stats.metadata
    owner = "KV head" if found.shared_centers else "head"
    extra = ", with covariance" if found.covariance else ""
    extra += ", with a surrogate" if found.features else ", without a surrogate"
    extra += ", with weights of hidden states" if found.kvzap_inputs else ""
    extra += ", with shares of heads" if found.fractions else ", without shares of heads"
    console.print(
        f"{found.model_name}: {found.num_tokens} tokens, {found.num_centers} centres per {owner}{extra}"
    )
    if found.trial is None:
        console.print("no trial: policy auto needs one (longer text, or --trial above 0)")
    else:
        _show_trial(console, found.trial)
    if found.curve is not None:
        _show_curve(console, found.curve)


def _show_trial(console: Console, trial: Trial) -> None:
    full, judged = trial.full, trial.judged
    title = f"trial: {trial.documents} held-out documents, {trial.tokens} tokens in the cache"
    if trial.questions:
        title += f", {trial.questions} questions"
    columns = ("loss", "kept", "cont", judged, "right")
    table = _table("policy", columns, title, _COLUMNS.format(judged, _JUDGED[judged]))
    full_nats, full_right = getattr(full, judged), getattr(full, f"{judged}_right")
    table.add_row("full", "", "100%", f"({full.once:.3f})", f"({full_nats:.3f})", f"({full_right:.3f})")
    for policy in trial.ranked:
        named = (policy, f"{trial.loss(policy):.3f}")
        for row in (row for row in trial.outcomes if row.policy == policy):
            right = getattr(row, f"{judged}_right") / full_right if full_right else math.nan
            table.add_row(
                *named,
                f"{row.fraction:.0%}",
                f"{row.once - full.once:+.3f}",
                f"{getattr(row, judged) - full_nats:+.3f}",
                f"{right:.1%}",
            )
            named = ("", "")
    console.print(table)
    for policy, reason in trial.refused.items():
        console.print(f"not tried: {policy}: {reason}", markup=False)
    if not trial.questions and not trial.reads_back:
        console.print(
            "repetition does not count: the full cache repeats a document no better than it continues it"
        )
    console.print(f"policy auto: [bold]{trial.best}[/bold]")
    if trial.formats:
        _show_formats(console, trial)


def _show_formats(console: Console, trial: Trial) -> None:
    """A line for each KV cache dtype, a column for each share of the bytes; the least loss is bold."""
    shares = tuple(dict.fromkeys(outcome.share for outcome in trial.formats))
    caption = "nats per token lost (tokens kept) in a share of the full cache's bytes in the model's dtype; "
    table = _table(
        "KV cache dtype",
        [f"{share:.0%}" for share in shares],
        f"{trial.best} at equal bytes",
        caption + "a budget in % takes the best",
    )
    for form in dict.fromkeys(outcome.kv_cache_dtype for outcome in trial.formats):
        own = {outcome.share: outcome for outcome in trial.formats if outcome.kv_cache_dtype == form}
        cells = [f"{trial.lost(own[share]):.3f} ({own[share].budget:.0f})" for share in shares]
        bold = [trial.format_at(share) == form for share in shares]
        table.add_row(
            form, *(f"[bold]{cell}[/]" if mark else cell for cell, mark in zip(cells, bold, strict=True))
        )
    console.print(table)


def _show_curve(console: Console, curve: LossCurve) -> None:
    """Loss over bytes, and the bytes over losses: a line for each content, length and KV cache dtype."""
    place = "content, tokens, format"
    over_bytes = _table(
        place,
        (f"{share:.0%}" for share in SHOWN_SHARES),
        f"loss curve of {curve.policy}: {len(curve.cells[0].losses)} held-out documents each",
        "loss that 95 % of documents like these do not exceed in this share of the prompt's bytes in the "
        "model's dtype; loss: by how much the probability of an answer falls below the full cache's",
    )
    over_losses = _table(
        place,
        ("right", *(f"{loss:g}" for loss in SHOWN_LOSSES)),
        "share of the prompt's bytes (tokens) that --kv-max-loss takes",
        "right: probability of an answer with the full cache; -: in this format even all tokens lose more",
    )
    for cell in sorted(curve.cells, key=lambda cell: curve.contents.index(cell.content)):
        place = f"{cell.content} {cell.num_tokens} {cell.kv_cache_dtype}"
        bounds = [cell.bound_within(share) for share in SHOWN_SHARES]
        over_bytes.add_row(place, *("" if bound is None else f"{bound:.1%}" for bound in bounds))
        takes = [cell.promised(loss) for loss in SHOWN_LOSSES]
        words = ["-" if math.isinf(kept) else f"{cell.share(kept):.1%} ({kept:.0f})" for kept in takes]
        over_losses.add_row(place, f"{cell.right:.1%}", *words)
    console.print(over_bytes)
    console.print(over_losses)
    for loss in SHOWN_LOSSES:
        form, share = curve.best_format(loss, None)
        console.print(f"--kv-max-loss {loss:g}: KV cache dtype [bold]{form}[/bold], {share:.1%} of the bytes")


def _table(first: str, others: Iterable[str], title: str, caption: str) -> Table:
    """One column of names, and columns of numbers."""
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.caption_justify = "left"
    made.add_column(first, no_wrap=True)
    for name in others:
        made.add_column(name, justify="right", no_wrap=True)
    return made
