import logging
import tomllib
from pathlib import Path

import pytest

from fedstrat.errors import ConfigError, UnknownSettingError
from fedstrat.naming import kebab, snake
from fedstrat.runs.config import defaults, keys, parse
from fedstrat.strategies import ALGORITHMS
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def shipped() -> dict:
    """The default run config of pyproject.toml, flattened as Flower does it."""
    flat = {}

    def walk(table: dict, prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value

    walk(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"], "")
    return flat


def refused(changes: dict, error: type[ConfigError] = ConfigError) -> str:
    """The message with which ``parse`` refuses the shipped config with these keys changed."""
    with pytest.raises(error) as caught:
        parse({**shipped(), **changes})
    return str(caught.value)


# --- defaults ------------------------------------------------------------------------------------------


def test_pyproject_and_code_have_the_same_keys():
    assert sorted(shipped()) == sorted(keys())


@pytest.mark.parametrize("name", sorted(shipped()))
def test_pyproject_and_code_have_the_same_default(name):
    ours, theirs = defaults()[name], shipped()[name]
    assert ours == theirs
    assert type(ours) is type(theirs)


def test_missing_keys_take_defaults():
    assert parse({}) == parse(shipped())
    assert parse({}).flat == shipped()


def test_every_key_says_what_it_means():
    assert [key.name for key in keys().values() if not key.doc or not key.type] == []


# --- values --------------------------------------------------------------------------------------------


def test_values_arrive_under_python_names():
    config = parse({"num-server-rounds": 7, "dataset.classes-per-client": 3, "train.lr-schedule": "cosine", "seed": 0})
    assert (config.num_server_rounds, config.dataset.classes_per_client, config.train.lr_schedule) == (
        7,
        3,
        "cosine",
    )
    assert config.seed == 0
    assert config.flat["dataset.classes-per-client"] == 3


def test_config_is_frozen():
    config = parse({})
    with pytest.raises(Exception, match="frozen"):
        config.seed = 2
    with pytest.raises(Exception, match="frozen"):
        config.train.lr = 2.0


def test_ints_are_taken_for_floats_and_become_floats():
    config = parse({"train.lr": 1, "craft.server-lr": 1})
    assert type(config.train.lr) is float
    assert type(config.flat["craft.server-lr"]) is float


@pytest.mark.parametrize(
    ("hidden", "widths"),
    [("100", (100,)), ("64, 32", (64, 32)), ("", ()), (100, (100,)), ("7,8,9", (7, 8, 9))],
)
def test_hidden_widths(hidden, widths):
    assert parse({"model.hidden": hidden}).model.widths == widths


def test_import_path_of_a_model_is_taken():
    assert parse({"model.name": "my_pkg.nets:Outer.make"}).model.name == "my_pkg.nets:Outer.make"


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("num-server-round", "num-server-rounds"),
        ("num_server_rounds", "num-server-rounds"),
        ("train.batchsize", "train.batch-size"),
        ("train.batch_size", "train.batch-size"),
        ("batch-size", "train.batch-size"),
        ("train.learning-rate", "train.lr"),
        ("train.learning_rate", "train.lr"),
        ("Train.LR", "train.lr"),
        ("crafft.server-lr", "craft.server-lr"),
        ("craft.serverlr", "craft.server-lr"),
        ("fedvssam.gama-l", "fedvssam.gamma-l"),
        ("datset.name", "dataset.name"),
    ],
)
def test_unknown_key_is_named_with_the_nearest(given, meant):
    message = refused({given: 1}, UnknownSettingError)
    assert f"'{given}'" in message
    assert f"did you mean '{meant}'?" in message


def test_unknown_key_in_a_table_lists_the_table():
    assert "holds: mu, gamma" in refused({"fedprox.zzz": 1}, UnknownSettingError)


def test_key_of_another_table_names_all_that_fit():
    message = refused({"rho": 0.1}, UnknownSettingError)
    assert "'fedsam.rho'" in message
    assert "'fedvssam.rho'" in message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("algorithm", "crafft", "did you mean 'craft'?"),
        ("algorithm", "CRAFT", "did you mean 'craft'?"),
        ("algorithm", 3, "'craft'"),
        ("dataset.name", "digit", "did you mean 'digits'?"),
        ("dataset.partition", "dirichelt", "did you mean 'dirichlet'?"),
        ("model.name", "resnet200", "did you mean 'resnet20'?"),
        ("model.name", "mine:", "'package.module:Factory'"),
        ("train.lr-schedule", "cosin", "did you mean 'cosine'?"),
        ("num-server-rounds", 0, "int >= 1"),
        ("num-server-rounds", 3.0, "int >= 1"),
        ("num-server-rounds", True, "int >= 1"),
        ("num-server-rounds", "30", "int >= 1"),
        ("num-clients", -1, "int >= 0"),
        ("fraction-train", 0.0, "float > 0 and <= 1"),
        ("fraction-train", 1.5, "float > 0 and <= 1"),
        ("fraction-evaluate", -0.1, "float >= 0 and <= 1"),
        ("seed", -1, "int >= 0"),
        ("dataset.test-fraction", 1.0, "float >= 0 and < 1"),
        ("dataset.min-size", -1, "int >= 0"),
        ("dataset.classes-per-client", 0, "int >= 1"),
        ("dataset.alpha", 0.0, "float > 0"),
        ("dataset.dir", 5, "str"),
        ("model.hidden", "64,,32", "comma-separated"),
        ("model.hidden", "64,0", "comma-separated"),
        ("model.hidden", True, "comma-separated"),
        ("train.lr", float("nan"), "float > 0"),
        ("train.lr", float("inf"), "float > 0"),
        ("train.lr", True, "float > 0"),
        ("train.lr", "0.1", "float > 0"),
        ("train.momentum", 1.0, "float >= 0 and < 1"),
        ("train.straggler-share", 1.1, "float >= 0 and <= 1"),
        ("train.device", "gpu", "cuda:N"),
        ("craft.server-lr", "big", "float"),
        ("craft.server-lr", False, "float"),
        ("craft.max-norm", float("inf"), "float"),
        ("craft.grouping", "layers", "did you mean 'layer'?"),
        ("scaffold.option", 3, "1 | 2"),
        ("scaffold.option", True, "1 | 2"),
        ("scaffold.option", 2.0, "1 | 2"),
        ("scaffold.weighting", "uniforn", "did you mean 'uniform'?"),
        ("fedavgm.nesterov", 1, "bool"),
    ],
)
def test_wrong_value_is_refused_with_key_expectation_and_value(name, value, said):
    message = refused({name: value})
    assert f"xpected '{name}' to be" in message
    assert said in message
    assert keys()[name].doc in message
    assert f"but got {value!r}" in message or f"'{name}' can't be {value!r}" in message
    if "did you mean" in said:  # before the list of names, which may be long
        assert message.index(said) < message.index("xpected")


def test_tables_of_other_algorithms_are_checked_too():
    assert "'fedprox.mu'" in refused({"algorithm": "craft", "fedprox.mu": "much"})


def test_all_wrong_values_are_named_at_once():
    message = refused({"train.lr": -1.0, "algorithm": "x", "fedprox.mu": -1.0, "seed": "a"})
    assert [name for name in ("train.lr", "algorithm", "fedprox.mu", "seed") if f"'{name}'" in message] == [
        "train.lr",
        "algorithm",
        "fedprox.mu",
        "seed",
    ]
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_decay_that_nothing_would_use_is_refused(schedule):
    message = refused({"train.lr-decay": 0.99, "train.lr-schedule": schedule})
    assert "'train.lr-decay' = 0.99 would be ignored" in message
    parse({"train.lr-decay": 0.99, "train.lr-schedule": "exponential"})


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.01])
def test_decay_is_in_0_1(decay):
    assert "> 0 and <= 1" in refused({"train.lr-decay": decay, "train.lr-schedule": "exponential"})


def test_more_replies_than_a_cohort_has_are_refused():
    # int(0.2 * 50) = 10 clients train in a round.
    parse({"num-clients": 50, "fraction-train": 0.2, "min-replies": 10})
    assert "'min-replies' = 11 can never be reached" in refused({"min-replies": 11})
    parse({"num-clients": 0, "min-replies": 11})


def test_goals_need_evaluations():
    for name, goal in (("target-accuracy", 0.9), ("patience", 3)):
        parse({name: goal})
        assert f"'{name}'" in refused({name: goal, "fraction-evaluate": 0})


def test_what_a_protocol_fixes_can_not_be_set_otherwise():
    for name, value in (("min-size", 20), ("min-size", 5), ("test-fraction", 0.2)):
        parse({"dataset.partition": "craft", f"dataset.{name}": value})
    message = refused({"dataset.partition": "craft", "dataset.min-size": 7, "dataset.test-fraction": 0.5})
    assert "'dataset.min-size' = 7 would be ignored, as the partition 'craft' fixes it at 20" in message
    assert "'dataset.test-fraction' = 0.5 would be ignored, as the partition 'craft' fixes it at 0.2" in message
    parse({"dataset.partition": "fedvssam-dirichlet", "dataset.test-fraction": 0.5})
    assert "fixes it at 0.25" in refused({"dataset.partition": "fedcspack", "dataset.test-fraction": 0.3})


def test_texts_need_a_model_that_reads_them():
    parse({"dataset.name": "csv", "model.name": "textcnn"})
    parse({"dataset.name": "dbpedia14", "model.name": "my_pkg.module:Factory"})
    assert "holds texts, which 'model.name' = 'mlp' can't read; set 'model.name' to textcnn" in refused(
        {"dataset.name": "dbpedia14"}
    )
    assert "'model.name' = 'textcnn' reads texts, but 'dataset.name' = 'digits' holds none; set" in refused(
        {"model.name": "textcnn"}
    )
    assert "'hashed' | 'frequent' | 'file'" in refused({"dataset.vocabulary": "hash"})
    for name, value in (("vocab-size", 2), ("max-length", 0), ("image-size", -1)):
        assert f"expected 'dataset.{name}'" in refused({f"dataset.{name}": value})


# --- the strategy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_is_built_with_its_own_and_the_shared_settings(name):
    config = parse(
        {
            "algorithm": name,
            "num-clients": 12,
            "fraction-train": 0.25,
            "fraction-evaluate": 0.5,
            "seed": 9,
            "round-timeout": 60,
            "connect-timeout": 5,
            "min-replies": 2,
            "max-failed-rounds": 4,
            "max-update-norm": 1.5,
        }
    )
    strategy = config.strategy()
    assert type(strategy) is ALGORITHMS[name].strategy
    shared = {
        "fraction_train": 0.25,
        "fraction_evaluate": 0.5,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
        "seed": 9,
        "round_timeout": 60.0,
        "connect_timeout": 5.0,
        "min_replies": 2,
        "max_failed_rounds": 4,
        "max_update_norm": 1.5,
    }
    assert {key: strategy.settings()[key] for key in shared} == shared
    own = {
        key: value
        for key, value in strategy.settings().items()
        if key in strategy.hypers and key not in FedStrategy.hypers and strategy.hypers[key].run_config
    }
    spelled = {k.partition(".")[2]: v for k, v in shipped().items() if k.startswith(f"{name}.")}
    assert set(own) == {snake(key) for key in spelled}
    for key, value in spelled.items():
        # None, off, is spelled 0 or "".
        assert own[snake(key)] == value or (own[snake(key)] is None and value in (0, "")), key


def test_own_hyper_parameters_reach_the_strategy():
    strategy = parse({"algorithm": "fedvssam", "fedvssam.gamma-l": 0.9, "fedvssam.rho": 1}).strategy()
    assert (strategy.gamma_l, strategy.rho) == (0.9, 1.0)


def test_zero_means_off():
    settings = parse({"round-timeout": 0, "max-update-norm": 0.0, "num-clients": 0}).strategy().settings()
    assert settings["round_timeout"] is None
    assert settings["max_update_norm"] is None
    assert settings["min_available_nodes"] == 2


def test_checking_a_run_config_logs_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        parse({"fraction-evaluate": 0.0})
    assert caplog.records == []


def test_an_algorithm_of_the_users_own_has_a_table_too(monkeypatch):
    parse({})  # the table of algorithms isn't read once and for all

    class Mine(ALGORITHMS["fedavg"].strategy):
        knob: float | None = hyper(default=None, gt=0.0, doc="how far to turn")

    monkeypatch.setitem(ALGORITHMS, "mine", ALGORITHMS["fedavg"]._replace(strategy=Mine))
    assert keys()["mine.knob"].default == 0.0
    assert parse({"algorithm": "mine", "mine.knob": 2}).strategy().knob == 2.0
    off = parse({"algorithm": "mine", "mine.knob": 0})
    assert off.strategy().knob is None
    assert off.flat["mine.knob"] == 0.0
    with pytest.raises(ConfigError, match=r"float > 0, or 0\.0 for off \(how far to turn\), but got -1"):
        parse({"mine.knob": -1})


# --- names ----------------------------------------------------------------------------------------


def test_names_convert_both_ways():
    assert kebab("test_fraction") == "test-fraction"
    assert snake("dataset.test-fraction") == "dataset.test_fraction"
