"""Options of recall: evicted tokens stay in pages on the host and return when queries need them."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.checks import check_choice, check_int, require

MODES = ("pass", "tokens", "query")
PACKINGS = ("time", "pca", "kmeans")
DIGESTS = ("minmax", "cuboid_mean", "centroid")
SOURCES = ("recent", "random", "mixture", "both")
MAX_EVERY = 256
MAX_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Recall:
    """How evicted tokens return.

    mode:    when pages are chosen besides passes: never, every so many tokens, for each token
    every:   tokens between two choices after the prompt, and the queries of each choice; in mode "pass" only
             the queries, in mode "query" 1
    blocks:  R, pages recalled per (layer, KV head) at a time; inside the budget
    packing: which evicted tokens share a page: neighbours in "time", or similar keys, along their
             principal direction ("pca") or by clusters ("kmeans")
    digest:  of a page's keys, as two corners lo, hi per dim: "minmax" bounds every product, "cuboid_mean" is
             the mean distance from the middle (ArkVale's estimate), "centroid" the mean
    source:  queries that choose at passes: the "recent" ones, the "mixture" of the statistics, the better
             of "both"; between passes always recent ones; or none ("random", a control)
    """

    mode: str = "pass"
    every: int = 16
    blocks: int = 8
    packing: str = "kmeans"
    digest: str = "cuboid_mean"
    source: str = "recent"

    def __post_init__(self) -> None:
        check_choice("recall", self.mode, MODES)
        check_int("recall option 'every'", self.every, 1, maximum=MAX_EVERY, field="recall")
        check_int("recall option 'blocks'", self.blocks, 1, maximum=MAX_BLOCKS, field="recall")
        check_choice("recall option 'packing'", self.packing, PACKINGS)
        check_choice("recall option 'digest'", self.digest, DIGESTS)
        check_choice("recall option 'source'", self.source, SOURCES)
        require(
            self.mode != "query" or self.every == 1,
            f"recall option 'every' is {self.every}, but recall query looks at every token by itself; leave "
            "it out, or write tokens.",
            "recall",
        )

    @property
    def between(self) -> bool:
        """Whether pages also return between passes."""
        return self.mode != "pass"

    @property
    def needs_queries(self) -> bool:
        """Whether recent queries are kept; the token's own query is always at hand."""
        return self.source in ("recent", "both") or (self.mode == "tokens" and self.source == "mixture")

    @property
    def needs_mixture(self) -> bool:
        """Whether statistics with centres choose pages at passes."""
        return self.source in ("mixture", "both")

    def slots(self, block_size: int) -> int:
        """Slots of the budget that hold recalled tokens."""
        return self.blocks * block_size

    def tokens_until(self, num_computed: int) -> int:
        """Most tokens after the prompt that may be computed before pages are chosen again."""
        assert self.between, "pages are chosen at passes alone"
        return self.every - num_computed % self.every

    def is_due(self, num_computed: int) -> bool:
        """Whether pages are chosen before the token at this position is computed."""
        return self.between and num_computed % self.every == 0
