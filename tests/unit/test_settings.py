"""Hyper-parameters: one declaration gives the constructor, its checks and its errors."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest

import fedstrat
from fedstrat.errors import ConfigError, UnknownSettingError
from fedstrat.strategies import ALGORITHMS
from fedstrat.strategies.settings import Configured, check, hyper, type_name


class Thing(Configured):
    rate: float = hyper(default=0.5, gt=0.0, le=1.0, symbol="eta", doc="how fast")
    count: int = hyper(default=3, ge=1, lt=10, doc="how many", flower_name="num_things")
    mode: Literal["slow", "fast"] = hyper(default="slow", doc="in which way")
    flag: bool = hyper(default=False, doc="whether at all")
    limit: float | None = hyper(default=None, gt=0.0, doc="at most so much")
    each: float | list[float] | None = hyper(default=None, doc="for all, or for each")
    call: Callable[[int], int] | None = hyper(default=None, doc="what is called", run_config=False)
    groups: str | Mapping[str, str] = hyper(default="layer", doc="what belongs together")


class Special(Thing):
    extra: int = hyper(default=1, doc="one more")
    rate: float = hyper(default=2.0, gt=0.0, doc="another default, without upper bound")
    flag = True  # switched off: not a setting of Special


def test_defaults_and_values():
    assert Thing().settings() == {
        "rate": 0.5, "count": 3, "mode": "slow", "flag": False, "limit": None, "each": None, "call": None,
        "groups": "layer",
    }  # fmt: skip
    thing = Thing(rate=1, count=9, mode="fast", flag=True, limit=0.1, each=[1.0, 2.0], call=abs, groups={"w": "a"})
    assert isinstance(thing.rate, float)
    assert isinstance(Thing(rate=np.float32(0.5)).rate, float)  # Flower's records refuse NumPy's own
    assert (thing.count, thing.mode, thing.flag, thing.limit, thing.each) == (9, "fast", True, 0.1, [1.0, 2.0])
    assert thing.call is abs
    assert thing.groups == {"w": "a"}
    assert Thing.rate == 0.5


REFUSED = [
    ("rate", 0.0, "> 0"),
    ("rate", -1.0, "> 0"),
    ("rate", 1.0000001, "<= 1"),
    ("rate", "0.5", "float"),
    ("rate", None, "float"),
    ("rate", True, "float"),
    ("rate", math.nan, "float"),
    ("rate", math.inf, "float"),
    ("count", 0, ">= 1"),
    ("count", 10, "< 10"),
    ("count", 2.0, "int"),
    ("count", True, "int"),
    ("count", "3", "int"),
    ("mode", "Fast", "'slow' | 'fast'"),
    ("mode", None, "'slow' | 'fast'"),
    ("flag", 1, "bool"),
    ("flag", "true", "bool"),
    ("limit", 0.0, "> 0"),
    ("limit", -math.inf, "float"),
    ("limit", math.nan, "float"),
    ("each", [1.0, math.nan], "float"),
    ("each", ["1"], "float"),
    ("call", 3, "Callable"),
    ("groups", 3, "str"),
]


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED, ids=[f"{n}-{v}" for n, v, _ in REFUSED])
def test_a_value_of_the_wrong_type_or_range_is_named_with_what_was_expected(name: str, value: Any, expected: str):
    with pytest.raises(ConfigError) as caught:
        Thing(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"Thing: expected '{name}' to be ")
    assert expected in message.partition("), but got")[0]
    assert f"({Thing.hypers[name].doc}), but got {value!r}" in message or name == "each"
    assert not isinstance(caught.value, UnknownSettingError)


def test_an_unknown_name_suggests_the_nearest_and_lists_the_known():
    with pytest.raises(
        UnknownSettingError, match=r"Thing has no setting 'raet'; did you mean 'rate'\? It takes: rate,"
    ):
        Thing(raet=0.5)
    with pytest.raises(UnknownSettingError, match=r"'zzz'\. It takes"):
        Thing(zzz=1)
    assert issubclass(UnknownSettingError, TypeError)  # as Python's own for an unknown keyword


def test_settings_are_keyword_only():
    with pytest.raises(TypeError):
        Thing(0.5)


def test_flower_s_spelling_is_accepted_once():
    assert Thing(num_things=4).count == 4
    for twice in ({"num_things": 4, "count": 4}, {"count": 4, "num_things": 5}):
        with pytest.raises(ConfigError, match=r"'count' was given twice, also as '(num_things|count)'"):
            Thing(**twice)
    with pytest.raises(ConfigError, match=r"expected 'count' to be int >= 1 and < 10"):
        Thing(num_things=0)


def test_a_subclass_adds_changes_and_switches_off():
    special = Special()
    assert (special.extra, special.rate, special.count, special.flag) == (1, 2.0, 3, True)
    assert Special(rate=50.0).rate == 50.0
    assert "flag" not in Special.hypers
    assert "flag" not in special.settings()
    with pytest.raises(UnknownSettingError, match="Special has no setting 'flag'"):
        Special(flag=False)
    # The parent is as it was.
    assert Thing().rate == 0.5
    assert Thing(flag=True).flag is True


def test_the_signature_is_that_of_the_declarations():
    parameters = inspect.signature(Special).parameters
    assert set(parameters) == set(Special.hypers)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    assert parameters["rate"].default == 2.0
    assert parameters["count"].annotation is int


def test_objects_do_not_share_values():
    Thing(rate=0.25)
    assert Thing().rate == 0.5


def test_ranges_and_types_in_words():
    assert Thing.hypers["rate"].range == "> 0 and <= 1"
    assert Thing.hypers["count"].range == ">= 1 and < 10"
    assert Thing.hypers["mode"].range == ""
    assert [type_name(Thing.hypers[n].type) for n in ("rate", "mode", "limit")] == [
        "float", "'slow' | 'fast'", "float | None",
    ]  # fmt: skip


# --- the declarations of the strategies ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_default_passes_its_own_check(name: str):
    strategy = ALGORITHMS[name].strategy
    defaults = {n: h.default for n, h in strategy.hypers.items()}
    assert check(strategy, defaults) == check(strategy, {})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_declaration_says_what_it_does(name: str):
    for setting, declared in ALGORITHMS[name].strategy.hypers.items():
        assert declared.doc, setting


def test_flower_s_spellings():
    assert fedstrat.FedProx(proximal_mu=0.5).mu == 0.5
    averaging = fedstrat.FedAvgM(server_momentum=0.5, server_learning_rate=0.25)
    assert (averaging.momentum, averaging.server_lr) == (0.5, 0.25)


def test_what_fedprox_has_not_is_refused():
    with pytest.raises(UnknownSettingError, match="FedProx has no setting 'server_lr'"):
        fedstrat.FedProx(server_lr=0.5)
    assert fedstrat.FedProx().server_lr == 1.0
