"""What a config may be, and the messages for what it may not."""

import pickle
from dataclasses import FrozenInstanceError, dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from compression_oracles import model_facts, query_stats

from kvreclaim import entry_points as third_parties
from kvreclaim.compression import registry as module
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.compression.policies.segments import Segments
from kvreclaim.compression.policy import CompressionPolicy, Mode
from kvreclaim.compression.registry import make_policy, policy_class, policy_names
from kvreclaim.errors import InvalidArgumentError


def test_defaults_and_positional_order():
    config = CompressionConfig("knorm", 300, 64, 2, 10, True, "union", "file.pt", {"keep": "large"})
    assert config.mode is Mode.UNION
    assert (config.policy, config.budget, config.interval, config.sinks) == ("knorm", 300, 64, 2)
    assert (config.recent, config.protect_prompt, config.stats) == (10, True, "file.pt")
    default = CompressionConfig()
    assert (default.policy, default.budget, default.interval) == ("auto", 2048, 128)
    assert (default.sinks, default.recent, default.protect_prompt) == (4, 128, False)
    assert default.mode is default.stats is None


def test_compares_hashes_and_travels():
    options = {"keep": "large"}
    one, two = (CompressionConfig("knorm", options=options) for _ in range(2))
    options["keep"] = "small"
    assert one == two != CompressionConfig("knorm")
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(FrozenInstanceError):
        one.budget = 3


@pytest.mark.parametrize("stats", [None, "a.pt", Path("a.safetensors"), query_stats(model_facts())])
def test_statistics_are_a_path_or_themselves(stats):
    assert CompressionConfig(stats=stats).stats is stats


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "h3o"}, "'h3o' is unknown; did you mean h2o\\? known are query_mixture, triattention"),
        ({"policy": "knorm(full)"}, "knorm wraps no other policy"),
        ({"policy": "segments(h3o)"}, "'h3o' is unknown"),
        ({"policy": "segments(knorm"}, "is no name"),
        ({"policy": ""}, "is no name"),
        ({"policy": None}, "is no name"),
        ({"mode": "per_layer"}, "mode is 'per_layer'; it must be one of union, per_head, per_layer_head"),
        ({"mode": ["union"]}, "mode is"),
        ({"budget": 0}, "budget is 0; it must be at least 1 token"),
        ({"budget": 2048.5}, "budget is 2048.5"),
        ({"budget": True}, "budget is True"),
        ({"budget": "many"}, "budget is 'many'; it must be at least 1 token"),
        ({"budget": "120%"}, "budget is '120%', and the full cache .* is 100%; give a share up to 100%"),
        ({"budget": "200%"}, "budget is '200%', and the full cache"),
        ({"budget": " 20000 % "}, "budget is ' 20000 % ', and the full cache"),
        ({"budget": "0%"}, "budget is '0%'; it must be at least 1 token"),
        ({"policy": "full", "budget": "25%"}, "policy 'full' keeps every token, and budget 0.25 is a share"),
        ({"budget": "-200%"}, "budget is '-200%'; it must be"),
        ({"budget": "nan%"}, "budget is 'nan%'"),
        ({"budget": 0.0}, "budget is 0.0"),
        ({"budget": 0.2, "max_loss": 0.1}, "budget is 0.2 and max_loss 0.1, which chooses a budget"),
        ({"budget": 132}, r"budget is 132 tokens, but sinks \+ recent = 132"),
        ({"interval": 0}, "interval is 0"),
        ({"sinks": -1}, "sinks is -1; it must be an integer >= 0"),
        ({"recent": -5}, "recent is -5"),
        ({"protect_prompt": 1}, "protect_prompt is 1"),
        ({"stats": 5}, "stats is 5"),
        ({"options": ["keep"]}, "options"),
        ({"policy": "knorm", "options": {"kept": "large"}}, "no option 'kept'; its options are keep"),
        ({"policy": "knorm", "options": {"keep": "big"}}, "must be one of small, large"),
        ({"policy": "full", "options": {"keep": "large"}}, "it has no options"),
        ({"policy": "critical(knorm)", "options": {"inner": 1}}, "no option 'inner'"),
        ({"policy": "triattention", "options": {"aggregate": "sum"}}, "must be one of mean, max"),
        ({"policy": "triattention", "options": {"use_trig": "no"}}, "true or false"),
        (
            {"policy": "auto", "options": {"keep": "large"}},
            "options belong to a policy, and policy is 'auto'",
        ),
        ({"options": {"offsets": []}}, "non-empty list"),
        ({"options": {"offsets": "16"}}, "non-empty list"),
        ({"options": {"offsets": [1, -2]}}, "an entry of query_mixture option 'offsets' is -2"),
        ({"options": {"offsets": [1 << 40]}}, "an entry of query_mixture option 'offsets' is 1099511627776"),
        ({"options": {"offsets": list(range(65))}}, "option 'offsets' has 65 entries; at most 64"),
        ({"options": {"value_norm": None}}, "true or false"),
        ({"options": {"normalise": "some"}}, "must be one of candidates, all"),
    ],
)
def test_every_mistake_is_named(fields, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        CompressionConfig(**{"policy": "query_mixture", **fields})
    assert str(caught.value).endswith(".")


def test_options_reach_the_policy_inside_a_wrapper():
    policy = CompressionConfig("critical(query_mixture)", options={"offsets": [1, 2]}).make_policy()
    assert policy.inner == QueryMixture(offsets=(1, 2))
    assert make_policy(" critical( knorm ) ") == make_policy("critical(knorm)")


@dataclass(frozen=True)
class Dice(CompressionPolicy):
    """Any third party's policy."""

    seed: int
    name = "dice"

    def score(self, view):
        return torch.rand(view.keys.shape[:2], generator=torch.Generator().manual_seed(self.seed))


def _dice(**body):
    """Dice with other class attributes."""
    return dataclass(frozen=True)(type("Dice", (Dice,), body))


LOOSE = dataclass(type("Loose", (CompressionPolicy,), {"name": "loose", "score": Dice.score}))()


class TestPolicyObjects:
    """Dice is not registered here, so its text means nothing without the object."""

    def test_are_kept_compared_and_sent(self):
        config = CompressionConfig(Dice(3), budget=256)
        assert (config.policy, config.make_policy()) == ("dice(seed=3)", Dice(3))
        assert config == CompressionConfig(Dice(3), budget=256) != CompressionConfig(Dice(4), budget=256)
        assert hash(config) == hash(CompressionConfig(Dice(3), budget=256))
        assert pickle.loads(pickle.dumps(config)).make_policy() == Dice(3)
        assert "policy='dice(seed=3)'" in repr(config)
        assert replace(config, budget=300).make_policy() == Dice(3)
        assert replace(config, policy="knorm") == CompressionConfig("knorm", budget=256)
        around = CompressionConfig(Segments(Dice(3), n=4))
        assert (around.policy, around.make_policy().inner) == ("segments(dice(seed=3), n=4)", Dice(3))

    def test_of_a_registered_policy_are_its_text(self):
        assert CompressionConfig(Knorm("large")) == CompressionConfig("knorm(keep=large)")

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            (Dice, r"policy is the class Dice; pass an object of it, such as Dice\(\)"),
            (LOOSE, "policy Loose is no frozen dataclass"),
            (type("Plain", (Dice,), {})(3), "policy Plain is no frozen dataclass"),
            (Segments(LOOSE), "policy Loose is no frozen dataclass"),
            (_dice(name="auto")(3), "policy Dice has the name 'auto'"),
            (_dice(name="two words")(3), "has the name 'two words'; give its class a name of one word"),
            (_dice(name="knorm")(3), "has the name 'knorm', which another policy has"),
            (Dice([3]), "cannot be hashed"),
            (Dice(torch.ones(2)), "cannot be written in a policy's name"),
        ],
    )
    def test_that_cannot_be_kept_are_refused(self, policy, message):
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            CompressionConfig(policy)
        assert caught.value.field == "policy"
        assert str(caught.value).endswith(".")

    def test_take_no_options(self):
        with pytest.raises(InvalidArgumentError, match="options go with a policy as text"):
            CompressionConfig(Dice(3), options={"seed": 4})


class TestEntryPoints:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch):
        points = [
            EntryPoint("dice", f"{__name__}:Dice", module.ENTRY_POINT_GROUP),
            EntryPoint("broken", "builtins:int", module.ENTRY_POINT_GROUP),
            EntryPoint("knorm", "builtins:int", module.ENTRY_POINT_GROUP),
        ]

        def installed(group):
            return [point for point in points if point.group == group]

        monkeypatch.setattr(third_parties, "installed", installed)

    def test_are_found_listed_and_given_options(self):
        assert policy_class("dice") is Dice
        assert policy_names()[-2:] == ("broken", "dice")
        assert CompressionConfig("dice", options={"seed": 3}).make_policy() == Dice(3)
        assert make_policy("segments(dice)", {"seed": 3}).default_mode is Mode.PER_LAYER_HEAD
        with pytest.raises(InvalidArgumentError, match="needs the option 'seed'"):
            make_policy("dice")
        with pytest.raises(InvalidArgumentError, match="its options are seed"):
            make_policy("dice", {"sed": 3})

    def test_must_be_policies(self):
        with pytest.raises(InvalidArgumentError, match="no dataclass derived from CompressionPolicy"):
            policy_class("broken")

    def test_do_not_take_over_a_built_in_name(self):
        assert make_policy("knorm").name == "knorm"


@pytest.mark.parametrize("written", ["20%", "0.2", 0.2, " 20 % "])
def test_a_share_is_of_the_prompt_in_whole_blocks(written: object) -> None:
    config = CompressionConfig("knorm", written, sinks=2, recent=13)
    assert config == CompressionConfig("knorm", 0.2, sinks=2, recent=13)
    assert [config.for_prompt(n, 16).budget for n in (1, 159, 160, 1000, 1040)] == [16, 16, 32, 192, 208]
    assert config.for_prompt(1000, 16) == replace(config, budget=192)
    assert replace(config, recent=15).for_prompt(1, 16).budget == 32  # one token more than what is kept
    assert replace(config, budget=300).for_prompt(1000, 16).budget == 300


@pytest.mark.parametrize("written", [2048, "2048", 2048.0])
def test_tokens_do_not_depend_on_the_prompt(written: object) -> None:
    config = CompressionConfig("knorm", written)
    assert config.budget == config.for_prompt(10, 16).budget == 2048
    assert CompressionConfig("knorm", "100%").for_prompt(4096, 16).budget == 4096
