"""A wrong option of a policy is one sentence that names it."""

from __future__ import annotations

import pytest

from kvreclaim.compression.registry import make_policy
from kvreclaim.errors import InvalidArgumentError

WRONG = {
    "ada_kv": [({"alpha": alpha}, "'alpha'") for alpha in (-0.1, 1.1, True, "0.2")],
    "expected_attention": [
        ({"horizon": 0}, "'horizon' is 0"),
        ({"horizon": 1 << 17}, "'horizon' is 131072; it must be an integer <= 65536"),
        ({"covariance": 1}, "'covariance' is 1; .*true or false"),
        ({"value_norm": "no"}, "'value_norm' is 'no'; .*true or false"),
        ({"group": "sum"}, "'group' is 'sum'; it must be one of mean, max"),
    ],
    "lagkv": [({"lag": 0}, "'lag' is 0"), ({"cross": 1}, "'cross' is 1")],
    "oracle": [
        ({"aggregate": "mean"}, "'aggregate' is 'mean'; it must be one of max, sum"),
        ({"horizon": 0}, "'horizon' is 0; .* or null for all"),
    ],
    "protect": [
        ({"first": -1}, "'first' is -1"),
        ({"last": 2.5}, "'last' is 2.5"),
        ({"spans": (3, 5)}, "'spans' is 3; it must be a pair"),
        ({"spans": 3}, "'spans' is 3"),
        ({"spans": ((5, 3),)}, r"'spans' is \(5, 3\)"),
        ({"spans": ((1, 2, 3),)}, r"'spans' is \(1, 2, 3\)"),
        ({"spans": ("12",)}, "'spans' is '12'"),
    ],
    "pyramidkv": [({"beta": beta}, "'beta'") for beta in (0.5, 0, True, "20")],
    "query_mixture": [
        ({"form": "cheap"}, "'form'"),
        ({"temperature": 0}, "'temperature'"),
        ({"temperature": "hot"}, "'temperature'"),
        ({"offsets": ()}, "'offsets'"),
        ({"value_norm": 1}, "'value_norm'"),
    ],
    "r_kv": [
        ({"weight": 1.1}, "'weight' is 1.1; it must be a number from 0 to 1"),
        ({"window": 0}, "'window'"),
        ({"kernel": 2}, "'kernel' is 2; it must be odd"),
        ({"threshold": -1}, "'threshold'"),
        ({"group": "sum"}, "'group' is 'sum'; it must be one of mean, max"),
        ({"similarity": "local"}, "'similarity' is 'local'; it must be one of full, block"),
        ({"block": 1}, "'block' is 1; it must be an integer >= 2"),
        ({"block": 10**9}, "'block' is 1000000000; it must be an integer <= 1024"),
        ({"window": 10**9}, "'window' is 1000000000; it must be an integer <= 1024"),
    ],
    "random": [({"seed": seed}, "'seed'") for seed in (-1, 1.5, True, "1")],
    "segments": [({"n": 0}, "'n' is 0"), ({"share": 1.5}, "'share' is 1.5"), ({"n": 2.0}, "'n' is 2.0")],
    "snapkv": [
        ({"window": 0}, "'window' is 0; it must be an integer >= 1"),
        ({"window": 1025}, "'window' is 1025; it must be an integer <= 1024"),
        ({"kernel": 4}, "'kernel' is 4; it must be odd"),
        ({"kernel": 1025}, "'kernel' is 1025; it must be an integer <= 1023"),
        ({"kernel": 0}, "'kernel' is 0"),
        ({"kernel": 5.0}, "'kernel' is 5.0"),
        ({"pooling": "mean"}, "'pooling' is 'mean'; it must be one of average, max"),
        ({"when": "decode"}, "'when' is 'decode'; it must be one of prefill, always"),
        ({"group": "sum"}, "'group' is 'sum'; it must be one of mean, max"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "message"), [(name, *row) for name, rows in WRONG.items() for row in rows]
)
def test_a_wrong_option_is_named(name, options, message):
    policy = make_policy(name)
    wrapped = {"inner": policy.inner} if hasattr(policy, "inner") else {}
    with pytest.raises(InvalidArgumentError, match=f"{name} option {message}"):
        type(policy)(**wrapped, **options)
