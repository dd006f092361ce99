"""How policies are written, read and written again; what is refused, and with which words."""

from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim import entry_points as third_parties
from kvreclaim.compression import registry
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.protect import Protect
from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.compression.policies.segments import Segments
from kvreclaim.compression.policies.snapkv import SnapKV
from kvreclaim.compression.policy import CompressionPolicy, Wrapper
from kvreclaim.compression.registry import make_policy, policy_spec
from kvreclaim.compression.spec.grammar import Spec, parse_spec, write_value
from kvreclaim.errors import InvalidArgumentError

MIXTURE = QueryMixture(value_norm=False)
WRITTEN = {
    "knorm": Knorm(),
    "knorm()": Knorm(),
    "knorm(keep=large)": Knorm("large"),
    " knorm ( keep = 'large' , ) ": Knorm("large"),
    "query_mixture(offsets=(1, 16), value_norm=false)": QueryMixture(offsets=(1, 16), value_norm=False),
    "query_mixture(offsets=(5))": QueryMixture(offsets=(5,)),
    "segments(inner=knorm(keep=large))": Segments(Knorm("large")),
    "segments": Segments(QueryMixture()),
    "segments(n=4)": Segments(QueryMixture(), 4),
    "segments(query_mixture, 4)": Segments(QueryMixture(), 4),
    "segments(knorm, 4, .25)": Segments(Knorm(), 4, 0.25),
    "segments(knorm, 4, share=1e-1)": Segments(Knorm(), 4, 0.1),
    "segments(query_mixture(value_norm=false), n=8)": Segments(MIXTURE),
    "protect(segments(snapkv(window=16), n=2), spans=((0, 10), (50, 60)))": Protect(
        Segments(SnapKV(window=16), 2), spans=((0, 10), (50, 60))
    ),
}
CANONICAL = (
    "knorm",
    "knorm(keep=large)",
    "query_mixture(offsets=(1, 16), value_norm=false)",
    "segments(query_mixture, n=4, share=0.25)",
    "protect(segments(snapkv(window=16), n=2), first=3, spans=((0, 10), (50, 60)))",
    "pyramidkv(snapkv, beta=3)",
    "oracle(horizon=7)",
)


@pytest.mark.parametrize(("text", "policy"), WRITTEN.items(), ids=WRITTEN)
def test_is_read(text, policy):
    assert make_policy(text) == policy
    assert CompressionConfig(text).make_policy() == policy


@pytest.mark.parametrize("text", WRITTEN)
def test_what_is_written_is_read_back(text):
    policy = make_policy(text)
    assert make_policy(policy_spec(policy)) == policy


@pytest.mark.parametrize("text", CANONICAL)
def test_is_written_in_one_way(text):
    assert policy_spec(make_policy(text)) == text


@pytest.mark.parametrize(
    ("wrapper", "inner"),
    [
        ("critical", "query_mixture"),
        ("segments", "query_mixture"),
        ("protect", "query_mixture"),
        ("pyramidkv", "snapkv"),
        ("ada_kv", "snapkv"),
    ],
)
def test_a_bare_wrapper_wraps_its_default(wrapper, inner):
    assert make_policy(wrapper).inner == make_policy(inner)
    assert policy_spec(make_policy(wrapper)) == f"{wrapper}({inner})"


def test_options_go_to_the_innermost_policy():
    policy = make_policy("protect(segments(n=2), first=5)", {"value_norm": False})
    assert policy == Protect(Segments(MIXTURE, 2), first=5)
    config = CompressionConfig("segments(query_mixture(value_norm=false))", options={"offsets": [3]})
    assert config.make_policy() == Segments(QueryMixture(offsets=(3,), value_norm=False))


MISTAKES = {
    "": "'' is no name: it ends where a value must follow",
    "(": "it ends where a value must follow",
    "knorm)": r"'\)' follows its end",
    "knorm(keep=large": r"'\)' is missing",
    "knorm(keep=)": r"a value is missing before '\)'",
    "knorm(,)": "a value is missing before ','",
    "knorm(keep large)": "'large' stands where ',' or",
    "knorm;": "';' cannot be read",
    "knorm 5": "'5' follows its end",
    "5": "it is a value",
    "(knorm)": "it is a value",
    "segments(" * 20: "nested more than 16 deep",
    "knom(keep=large)": "'knom' is unknown; did you mean knorm\\? known are query_mixture",
    "segments(knom)": "'knom' is unknown",
    "knorm(full)": "wraps no other policy and takes its options by name; its options are keep",
    "full(3)": "takes its options by name; it has no options",
    "knorm(kept=large)": "knorm has no option 'kept'; its options are keep",
    "segments(knorm, m=3)": "segments has no option 'm'; its options are n, share",
    "segments(8)": r"given 8 to wrap; write a policy first: segments\(knorm",
    "segments(knorm, 1, .5, 7)": "given 7 out of place; unnamed arguments come first, and it takes 3",
    "segments(n=3, knorm)": "given 'knorm' out of place",
    "segments(knorm, 3, n=3)": "segments is given the option 'n' twice",
    "segments(knorm, inner=knorm)": "given the option 'inner' twice",
    "segments(knorm, n=full())": r"option 'n': full\(…\) is a policy; write a plain value",
    "segments(knorm, n=eight)": "segments option 'n' is 'eight'; it must be an integer",
    "segments(knorm, n=9999999)": "segments option 'n' is 9999999; it must be an integer <= 1048576",
    "knorm(keep=true)": "knorm option 'keep' is True; it must be one of small, large",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items(), ids=range(len(MISTAKES)))
def test_every_mistake_is_named(text, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        make_policy(text)
    assert str(caught.value).endswith(".")


def test_an_option_given_in_both_places_is_refused():
    with pytest.raises(InvalidArgumentError, match="knorm is given the option 'keep' twice"):
        make_policy("segments(knorm(keep=large))", {"keep": "large"})


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(alphabet="abc_.-+e15 (),='", max_size=8)
    | st.sampled_from(["true", "none", "1e5", "inf", "-3"]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


@given(VALUES)
def test_any_value_survives_writing_and_reading(value):
    (pair,) = parse_spec(f"name(option={write_value(value)})").args
    assert repr(pair) == repr(("option", value))


def test_a_value_without_a_written_form_is_refused():
    for value in ({}, "both ' and \"", float("nan"), object()):
        with pytest.raises(InvalidArgumentError, match="cannot be written in a policy's name"):
            write_value(value)


def test_an_enum_is_written_as_its_value():
    assert write_value(StrEnum("Side", ["LEFT"]).LEFT) == "left"


def test_words_and_numbers_are_distinguished():
    spec = parse_spec("p(1, -2, 3., .5, 1e3, a1, 1a, true, True, none, '7', x-y, (), (1, (2, b)), q(r))")
    values = [value for _, value in spec.args]
    assert values[:7] == [1, -2, 3.0, 0.5, 1000.0, "a1", "1a"]
    assert values[7:] == [True, "True", None, "7", "x-y", (), (1, (2, "b")), Spec("q", ((None, "r"),))]


@dataclass(frozen=True)
class Newest(CompressionPolicy):
    """A third party's policy with an option that has no default."""

    weight: float
    name = "newest"

    def score(self, view):
        return view.source.key_norms() * self.weight


@dataclass(frozen=True)
class Doubled(Wrapper):
    """A third party's wrapper with a default of its own."""

    name = "doubled"
    default_inner = "knorm"

    def score(self, view):
        return 2 * self.inner.score(view)


class TestThirdParties:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch):
        points = [
            EntryPoint(c.name, f"{__name__}:{c.__name__}", registry.ENTRY_POINT_GROUP)
            for c in (Newest, Doubled)
        ]
        monkeypatch.setattr(third_parties, "installed", lambda group: points)

    def test_are_written_and_wrapped_like_any_other(self):
        policy = make_policy("segments(doubled(newest(weight=2.5)), n=2)")
        assert policy == Segments(Doubled(Newest(2.5)), 2)
        assert policy_spec(policy) == "segments(doubled(newest(weight=2.5)), n=2)"
        assert make_policy("doubled") == Doubled(Knorm())
        assert make_policy("segments(newest)", {"weight": 1}) == Segments(Newest(1))

    def test_a_missing_option_is_named(self):
        with pytest.raises(InvalidArgumentError, match="newest needs the option 'weight'"):
            make_policy("doubled(newest)")
