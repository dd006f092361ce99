"""Prediction of a token's importance from its hidden state, during its forward pass.

The target is KVzip's score: the logarithm of the largest attention weight of the token for any later query
in a repeated document. (The surrogate also uses a token's age, and learns which tokens are needed after a
given moment: surrogate.py.) A hidden state predicts more than the cached key and value, but no longer exists
when a cache is compressed, so the score is stored per slot.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvreclaim.compression.public_kvzap import KVzapWeights
from kvreclaim.compression.stats import LayerStats
from kvreclaim.compression.surrogate import LEAST_PROBABILITY
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts

UNITS = 128
"""Hidden units of the form that is not linear, as far as we fit it ourselves."""
_RIDGE = 0.03
"""The ridge, as a share of the mean variance of an input."""
_STEPS, _BATCH, _RATE, _DECAY = 300, 512, 3e-3, 0.1
"""Settings of the fit of hidden units; after more steps it knows the text by heart."""


def token_scores(hidden: Tensor, stats: LayerStats) -> Tensor:
    """Score tokens from their layer's input [T, M] of any float dtype. Returns: [T, K] fp32."""
    assert stats.kvzap_out is not None, "needs has TOKEN_SCORES"
    rows = hidden.float()
    if stats.kvzap_in is not None:
        rows = functional.gelu(_affine(rows, stats.kvzap_in))
    return _affine(rows, stats.kvzap_out)


def _affine(rows: Tensor, weights: Tensor) -> Tensor:
    """Apply weights [N, M + 1], the bias last, to rows [T, M]. Returns: [T, N]."""
    return torch.addmm(weights[:, -1], rows, weights[:, :-1].T)


class KVzapFit:
    """Fits one layer after the other. Holds the documents of one layer at a time.

    units: hidden units of a layer, which all its heads share; 0: scores are linear
    """

    def __init__(self, facts: ModelFacts, units: int = 0) -> None:
        if facts.hidden_size is None:
            raise InvalidArgumentError(
                f"attention layers of {facts.name!r} do not show what they are given, which kvzap weighs; "
                "leave it out, and use surrogate."
            )
        self.units, self._num_layers = units, facts.num_layers
        self._inner: list[Tensor] = []
        self._outer: list[Tensor] = []
        self._held: list[tuple[Tensor, Tensor]] = []

    def add(self, layer: int, hidden: Tensor, reached: Tensor) -> None:
        """Add one layer of a document's first copy. Layers come in order: all documents of one, then all of
        the next.

        Args:
            hidden:  [T, M] input of the layer, any float dtype; kept until the next layer
            reached: [K, T] largest attention weight of each token for a later query, 0 to 1
        """
        if layer > len(self._outer):
            self._fit()
        assert layer == len(self._outer), f"layer {layer} after {len(self._outer)} layers"
        self._held.append((hidden, reached.clamp_min(LEAST_PROBABILITY).log().T))

    def build(self) -> KVzapWeights:
        """Return the weights on the CPU. Raises: InvalidArgumentError if a layer has no token."""
        if self._held:
            self._fit()
        if len(self._outer) < self._num_layers:
            raise InvalidArgumentError(
                f"layer {len(self._outer)} has no token to fit; add every layer of a document."
            )
        return KVzapWeights(torch.stack(self._inner) if self._inner else None, torch.stack(self._outer))

    def _fit(self) -> None:
        hidden, targets = (torch.cat(rows).float() for rows in zip(*self._held, strict=True))
        self._held.clear()
        if self.units:
            inner, outer = _units(hidden, targets, self.units, len(self._outer))
            self._inner.append(inner.cpu())
        else:
            outer = _ridge(hidden, targets)
        self._outer.append(outer.cpu())


def _ridge(rows: Tensor, targets: Tensor) -> Tensor:
    """Fit weights [K, M + 1] from rows [T, M] to targets [T, K]; the bias is not regularised."""
    mean, middle = rows.mean(0), targets.mean(0)
    away = rows - mean
    moments, products = (away.T @ away).double(), (away.T @ (targets - middle)).double()
    moments.diagonal().add_(_RIDGE * moments.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    solved = torch.cholesky_solve(products, torch.linalg.cholesky(moments))
    return _folded(solved.T.float(), mean, middle)


def _folded(weights: Tensor, mean: Tensor, middle: Tensor) -> Tensor:
    """Append the bias to weights [N, M] of centred inputs and outputs. mean: [M]; middle: [N]"""
    return torch.cat([weights, (middle - weights @ mean)[:, None]], dim=1)


def _units(rows: Tensor, targets: Tensor, units: int, seed: int) -> tuple[Tensor, Tensor]:
    """Fit [U, M + 1] and [K, U + 1] with Adam, on inputs and targets of mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(seed)
    tiny = torch.finfo(torch.float32).tiny
    mean, spread = rows.mean(0), rows.std(0, correction=0).clamp_min(tiny)
    middle, width = targets.mean(0), targets.std(0, correction=0).clamp_min(tiny)
    with torch.inference_mode(False), torch.enable_grad():
        x, y = ((rows - mean) / spread).clone(), ((targets - middle) / width).clone()
        shapes = (units, x.shape[1]), (units,), (y.shape[1], units), (y.shape[1],)
        weights = [
            nn.Parameter(_uniform(shape, fan, generator).to(x.device))
            for shape, fan in zip(shapes, (x.shape[1], x.shape[1], units, units), strict=True)
        ]
        adam = torch.optim.AdamW(weights, lr=_RATE, weight_decay=_DECAY)
        slow = torch.optim.lr_scheduler.OneCycleLR(adam, _RATE, total_steps=_STEPS)
        for _ in range(_STEPS):
            some = torch.randint(len(x), (min(_BATCH, len(x)),), generator=generator).to(x.device)
            found = functional.linear(functional.gelu(functional.linear(x[some], *weights[:2])), *weights[2:])
            adam.zero_grad()
            functional.mse_loss(found, y[some]).backward()
            adam.step()
            slow.step()
    w1, b1, w2, b2 = (weight.detach() for weight in weights)
    inner = _folded(w1 / spread, mean, b1)
    return inner, torch.cat([w2 * width[:, None], (b2 * width + middle)[:, None]], dim=1)


def _uniform(shape: tuple[int, ...], fan: int, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-(fan**-0.5), fan**-0.5, generator=generator)
