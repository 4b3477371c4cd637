"""Settings: filling a nested dataclass from TOML and --set, and saying what is wrong with them."""

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kit.disk import parse_toml
from kit.settings import RunError, describe, fill, parse_number
from recipe.asynchronous.run import Async
from recipe.full.settings import FullRecipe
from ref.network import Config, RopeScaling
from scaled.pretrain import Full
from scaled.rl import Rl


@dataclass(frozen=True)
class Data:
    """Where text comes from."""

    corpus: str | None = None
    """Folder to read."""
    limit: int = 10
    """Largest file."""


@dataclass(frozen=True)
class Settings:
    """All of it."""

    seed: int = 0
    """Seed of everything."""
    lr: float = 1e-3
    """Learning
    rate."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Which optimizer."""
    packed: bool = True
    """Pack documents."""
    depths: tuple[float, ...] = (0.5, 0.5)
    folder: Path = Path("x")
    data: Data = field(default_factory=lambda: Data(limit=99))
    level: Literal[1, 2] = 1

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError("lr must be positive")


def test_defaults_of_the_outer_class_win():
    assert fill(Settings, None) == Settings()
    assert fill(Settings, {"data": {"corpus": "y"}}).data == Data("y", 99)


def test_set_beats_toml():
    toml = {"seed": 1, "data": {"limit": 5}, "depths": [1, 2, 3]}
    filled = fill(Settings, toml, ["seed=2", "data.corpus=a=b", "lr=3", "packed=no", "optimizer=adamw", "level=2"])
    assert filled == Settings(2, 3.0, "adamw", False, (1.0, 2.0, 3.0), Path("x"), Data("a=b", 5), 2)
    assert toml["seed"] == 1


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("20.0", 20), ("9007199254740991", 2**53 - 1), ("+0", 0)])
def test_whole_numbers(text, value):
    filled = fill(Data, None, [f"limit={text}"])
    assert filled.limit == value and type(filled.limit) is int
    assert fill(Data, parse_toml(f"limit = {text}")) == filled


@pytest.mark.parametrize("text", ["1e99", "1e16", "9007199254740992", "-1e300", "9" * 300])
def test_a_whole_number_beyond_those_that_float64_tells_apart_is_refused(text):
    for toml, sets in (({}, [f"limit={text}"]), (parse_toml(f"limit = {text}"), [])):
        with pytest.raises(
            RunError, match="^limit must lie between -9007199254740991 and 9007199254740991, got "
        ) as error:
            fill(Data, toml, sets)
        assert len(str(error.value)) < 120


ASCII_NUMBER = st.from_regex(r"[+-]?(0|[1-9][0-9]{0,12})(\.[0-9]{1,6})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
ODD_NUMBER = st.sampled_from(
    "1_0 ١٠ １０ ² 1e e5 .5 5. 007 0x10 1_0.0 inf -inf nan NaN 1e400 --1 +-1 1,0 ½".split() + ["1 0", "", "9" * 5000]
)
LETTERS = st.text(st.sampled_from("0123456789+-._eE١٢٠０xX \t"), max_size=8)


@given(st.one_of(ASCII_NUMBER, ODD_NUMBER, LETTERS))
@example("9" * 309)
def test_numbers_have_one_grammar(text):
    """A setting from --set is a number exactly if TOML reads the same text as this decimal number, without
    underscores."""
    text = text.strip()
    try:
        expected = parse_toml(f"x = {text}")["x"] if text.isascii() and not set(text) & set("_xX\t ") else None
        expected = expected if type(expected) is int or type(expected) is float and math.isfinite(expected) else None
    except ValueError:
        expected = None
    number = parse_number(text)
    number = None if type(number) is float and not math.isfinite(number) else number
    assert number == expected and type(number) is type(expected)
    for cls, key in ((Settings, "lr"), (Data, "limit")):
        outcomes = []
        for toml, sets in (({}, [f"{key}={text}"]), ({key: expected}, [])):
            try:
                outcomes.append(getattr(fill(cls, toml, sets), key))
            except RunError as error:
                outcomes.append(re.sub(", got .*|; got .*", "", str(error)))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("value", [10**5000, -(10**5000), "x" * 10**6, [1] * 10**5, {"a": 1}, "a\nb"], ids=range(6))
def test_a_long_or_odd_value_is_refused_in_one_short_line(value):
    for key in ("seed", "lr"):
        with pytest.raises(RunError) as error:
            fill(Settings, {key: value})
        assert len(str(error.value)) < 200 and "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [0, 1, 2**53 - 1])
def test_seeds(seed):
    assert fill(Settings, None, [f"seed={seed}"]).seed == seed == fill(Settings, {"seed": seed}).seed


@pytest.mark.parametrize("seed", [-1, -3, 2**53, 2**63, 2**64, 10**30])
def test_seeds_that_a_generator_would_not_take_or_that_others_could_not_be_derived_from(seed):
    for toml, sets in (({}, [f"seed={seed}"]), ({"seed": seed}, [])):
        with pytest.raises(RunError, match=f"^seed must lie between 0 and 9007199254740991, got {seed}$"):
            fill(Settings, toml, sets)


def test_a_pair_is_taken_as_it_is():
    filled = fill(Settings, {"data": {"corpus": "x"}}, ["data.corpus=y", ("data.corpus", "none"), ("folder", " a=b ")])
    assert filled.data.corpus == "none" and filled.folder == Path(" a=b ")


def test_none_and_lists():
    assert fill(Settings, {"data": {"corpus": "x"}}, ["data.corpus=none"]).data.corpus is None
    assert fill(Settings, None, ["depths=1,0.5"]).depths == (1.0, 0.5)


@pytest.mark.parametrize(
    ("toml", "sets", "says"),
    [
        ({}, ["sed=1"], "did you mean seed"),
        ({}, ["data.corpsu=1"], "did you mean data.corpus"),
        ({"corpus": "x"}, [], "did you mean data.corpus"),
        ({}, ["zzz=1"], "known keys: seed, lr"),
        ({"data": 3}, [], "data is a group of keys"),
        ({}, ["data=3"], "data is a group of keys"),
        ({}, ["seed.a=3"], "seed expects a whole number"),
        ({"seed": 3}, ["seed.a=3"], "is a value, not a group"),
        ({}, ["seed"], "KEY=VALUE"),
        ({}, ["=3"], "KEY=VALUE"),
        ({}, ["seed=x"], "seed expects a whole number, got 'x'"),
        ({"seed": 1.5}, [], "seed expects a whole number"),
        ({"seed": True}, [], "seed expects a whole number"),
        ({"seed": "1"}, [], "seed expects a whole number"),
        ({}, ["lr=nan"], "lr expects a number"),
        ({"lr": 3.41e38}, [], "lr must fit float32, which ends at 3.4e+38; got 3.41e+38"),
        ({}, ["depths=0.5,-1e39"], "depths must fit float32, which ends at 3.4e+38; got -1e+39"),
        ({}, ["lr=-1"], "lr must be positive"),
        ({"packed": 1}, [], "packed expects true or false"),
        ({}, ["optimizer=sgd"], "optimizer expects muon or adamw, got 'sgd'"),
        ({"level": "1"}, [], "level expects 1 or 2"),
        ({"depths": [1, "x"]}, [], "depths expects a number"),
        ({"data": {"corpus": 3}}, [], "data.corpus expects text or none"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(toml, sets, says):
    with pytest.raises(RunError) as raised:
        fill(Settings, toml, sets)
    assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("cls", [FullRecipe, Rl, Full, Async], ids=lambda cls: cls.__name__)
def test_no_price_weight_or_other_number_is_larger_than_float32_holds(cls):
    """It would be infinite in any tensor of float32; 1e300 was once taken for the weight of hints."""
    keys = [key for key, kind, *_ in describe(cls) if kind in ("a number", "a number or none")]
    assert len(keys) > 3
    for key in keys:
        with pytest.raises(RunError) as raised:
            fill(cls, None, [f"{key}=1e300"])
        assert str(raised.value) == f"{key} must fit float32, which ends at 3.4e+38; got 1e+300"


def test_the_largest_number_of_float32_is_a_number():
    largest = torch.finfo(torch.float32).max
    assert fill(Settings, {"lr": largest}).lr == largest


def test_the_network_of_another_family():
    """Its nested settings are typed like all others, and what no family has is refused in one line."""
    sets = [
        "num_experts=0",
        "qk_norm=no",
        "attention_bias=yes",
        "rope_scaling.rope_type=yarn",
        "rope_scaling.factor=4",
        "rope_theta=1e6",
    ]
    filled = fill(Config, {"rope_scaling": {"original_max_position_embeddings": 256}}, sets)
    assert (filled.model_type, filled.rope_theta) == ("qwen2", 1e6) and filled.rope_scaling == RopeScaling(
        "yarn", 4.0, 256
    )
    assert fill(Config, json.loads(json.dumps(asdict(filled)))) == filled, (
        "as a run that goes on reads its own settings"
    )
    for wrong, says in (
        (
            "qk_norm=no",
            "qk_norm and attention_bias must fit a family: none is with experts, without qk_norm and "
            "without attention_bias",
        ),
        (
            "rope_scaling.rope_type=dynamic",
            "rope_scaling.rope_type expects default or linear or llama3 or yarn, got 'dynamic'",
        ),
        ("rope_scaling.factor=0.5", "rope_scaling.factor must be at least 1 and finite; got 0.5"),
        ("rope_scaling=yarn", "rope_scaling is a group of keys"),
    ):
        with pytest.raises(RunError) as raised:
            fill(Config, None, [wrong])
        assert says in str(raised.value) and "\n" not in str(raised.value)


def test_describe():
    rows = {key: (kind, default, doc) for key, kind, default, doc in describe(Settings)}
    assert rows["data.limit"] == ("a whole number", 99, "Largest file.")
    assert rows["lr"][2] == "Learning rate."
    assert rows["optimizer"][0] == "muon or adamw"
    assert list(rows)[:2] == ["seed", "lr"]


@dataclass(frozen=True)
class Plain:
    share: float = 0.0
    delay: float = -1.0
    stages: Literal[1, 2] = 1


def test_a_number_whose_default_is_zero_is_not_negative_and_true_is_no_number():
    assert fill(Plain, None, ["delay=-2", "stages=2"]) == Plain(0.0, -2.0, 2)
    with pytest.raises(RunError, match="share must not be negative, got -0.5"):
        fill(Plain, None, ["share=-0.5"])
    with pytest.raises(RunError, match="stages expects 1 or 2, got 'True'"):
        fill(Plain, {"stages": True})


@dataclass(frozen=True)
class Slices:
    max_share: float = field(default=0.5, metadata={"renamed_from": "most"})
    """Greatest share."""


@dataclass(frozen=True)
class Deleting:
    slices: Slices = field(default_factory=Slices)


@given(st.floats(0, 1, width=32), st.booleans())
def test_an_old_name_of_a_setting_is_read(value, by_toml):
    toml, sets = ({"slices": {"most": value}}, []) if by_toml else (None, [f"slices.most={value}"])
    assert fill(Deleting, toml, sets) == fill(Deleting, {"slices": {"max_share": value}}) == Deleting(Slices(value))


@dataclass(frozen=True)
class Announced:
    """Its names stand nowhere else: the line comes once for each process."""

    greatest: float = field(default=0.5, metadata={"renamed_from": "top"})
    """Greatest share."""


def test_one_line_names_the_new_name(capsys):
    for _ in range(2):
        fill(Announced, {"top": 0.25})
    assert capsys.readouterr().err == "the setting top is now called greatest\n"
    with pytest.raises(RunError, match="top is now called greatest; leave out top"):
        fill(Announced, {"top": 0.25, "greatest": 0.5})
    with pytest.raises(RunError, match="unknown key 'tops'"):
        fill(Announced, {"tops": 0.25})
