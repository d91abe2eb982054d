"""Reading recipes: what extends what, what is searched, and what is refused."""

from pathlib import Path

import pytest

from fedstrat.errors import ConfigError
from fedstrat.experiments.recipe import read
from fedstrat.experiments.request import Given, build, numbers

ROOT = Path(__file__).parents[2]

BASE = """
title = "Base"
seeds = [1, 2]
[run]
num-clients = 10
dataset.validation-fraction = 0.2
[run.train]
momentum = 0.5
[grid]
train.lr = [0.1, 0.2]
[methods.FedAvg]
algorithm = "fedavg"
[methods.CRAFT]
algorithm = "craft"
run.craft.rtol = 0.01
grid.craft.server-lr = [0.1, 0.3]
[published]
source = "a paper"
rows.FedAvg = { mean = 0.5 }
rows.CRAFT = { mean = 0.6 }
"""


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, "base.toml", BASE)


def test_a_recipe_is_read(base: Path) -> None:
    recipe = read(base)
    assert recipe.run == {"num-clients": 10, "dataset.validation-fraction": 0.2, "train.momentum": 0.5}
    fedavg, craft = recipe.methods
    assert fedavg.settings == [(("train.lr", 0.1),), (("train.lr", 0.2),)]
    assert craft.settings == [
        (("train.lr", lr), ("craft.server-lr", server_lr)) for lr in (0.1, 0.2) for server_lr in (0.1, 0.3)
    ]
    assert recipe.run_config(craft, craft.settings[1], 2) == {
        **recipe.run,
        "algorithm": "craft",
        "craft.rtol": 0.01,
        "train.lr": 0.1,
        "craft.server-lr": 0.3,
        "seed": 2,
    }


def test_runs_come_seed_by_seed(base: Path) -> None:
    points = list(read(base).points())
    assert len(points) == 2 * (2 + 4)
    assert [seed for _, _, seed in points] == [1] * 6 + [2] * 6


def test_a_recipe_that_extends_others_holds_only_what_differs(tmp_path: Path, base: Path) -> None:
    write(tmp_path, "part.toml", "seeds = [7]\n[run]\nnum-clients = 4\n[run.train]\nmomentum = 0.1")
    small = write(
        tmp_path,
        "small.toml",
        f'extends = ["{base.name}", "part.toml"]\ntitle = "Small"\nonly = ["CRAFT"]\n'
        "[run.train]\nmomentum = 0.0\n[methods.CRAFT]\ngrid.craft.server-lr = [1.0]",
    )
    recipe = read(small)
    assert (recipe.title, recipe.seeds) == ("Small", (7,))
    assert recipe.run == {"num-clients": 4, "dataset.validation-fraction": 0.2, "train.momentum": 0.0}
    (craft,) = recipe.methods
    assert (craft.fixed, craft.grid["craft.server-lr"]) == ({"craft.rtol": 0.01}, (1.0,))
    assert recipe.published == read(base).published


def test_published_tables_are_replaced_as_a_whole(tmp_path: Path, base: Path) -> None:
    other = write(tmp_path, "o.toml", 'extends = "base.toml"\n[published]\nsource = "x"\nrows.FedAvg = { mean = 0.1 }')
    published = read(other).published
    assert published is not None
    assert published.rows == {"FedAvg": {"mean": 0.1}}


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("seeds = [1, 2]", "seeds = [1, 1]", "every seed once"),
        ("seeds = [1, 2]", "seeds = []", "'seeds'"),
        ("seeds = [1, 2]", "", "'seeds': field required"),
        ("seeds = [1, 2]", "seeds = [1]\ntargts = [0.5]", "no key 'targts'; did you mean 'targets'"),
        ("[0.1, 0.3]", "[0.1, 0.1]", "each value once"),
        ("[0.1, 0.3]", "[]", "each value once"),
        ("[0.1, 0.3]", "0.1", "'methods.CRAFT.grid.craft.server-lr' to be a list"),
        ("momentum = 0.5", "momentum = [0.5]", "'run.train.momentum' to be a number"),
        ("validation-fraction = 0.2", "validation-fraction = 0.0", "chosen on validation data.*is 0"),
        ("rtol = 0.01", "rtol = 0.01\nrun.seed = 3", "'seed' of 'CRAFT'"),
        ('algorithm = "craft"', 'algorithm = "craft"\nlabel = "x"', "no key 'methods.CRAFT.label'"),
        ('title = "Base"', 'title = "Base"\nonly = ["FedAvgg"]', "no such method; did you mean 'FedAvg'"),
        ('title = "Base"', 'extends = "base.toml"\ntitle = "Base"', "circle"),
        ('title = "Base"', 'extends = "nowhere.toml"\ntitle = "Base"', "there is no such file"),
        ('title = "Base"', "title =", "as TOML"),
        ("num-clients = 10", 'num-clients = 10\n"train.momentum" = 0.1', "given twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in BASE
    with pytest.raises(ConfigError, match=complaint):
        read(write(tmp_path, "base.toml", BASE.replace(old, new, 1)))


def test_one_setting_needs_no_validation_data(tmp_path: Path) -> None:
    text = (
        BASE.replace("[0.1, 0.2]", "[0.1]").replace("[0.1, 0.3]", "[0.1]").replace("fraction = 0.2", "fraction = 0.0")
    )
    assert all(len(method.settings) == 1 for method in read(write(tmp_path, "one.toml", text)).methods)


# --- flags ----------------------------------------------------------------------------------------------------


def test_flags_make_a_recipe() -> None:
    given = Given(
        algorithms=("fedavg", "craft"),
        seeds=(3, 4),
        grid=("train.lr=0.1,.5", "craft.server-lr=0.1,0.3"),
        config=("num-clients=7 dataset.validation-fraction=0.1",),
        targets=(0.5,),
    )
    recipe = build(None, given, ROOT)
    assert [(m.label, m.algorithm) for m in recipe.methods] == [("FedAvg", "fedavg"), ("CRAFT", "craft")]
    assert [dict(m.grid) for m in recipe.methods] == [
        {"train.lr": (0.1, 0.5)},
        {"train.lr": (0.1, 0.5), "craft.server-lr": (0.1, 0.3)},
    ]
    assert recipe.run == {"num-clients": 7, "dataset.validation-fraction": 0.1}
    assert (recipe.seeds, recipe.targets) == ((3, 4), (0.5,))


def test_flags_stand_above_the_file(base: Path) -> None:
    given = Given(algorithms=("CRAFT",), seeds=(9,), config=("train.lr=0.7 craft.rtol=0.5 num-clients=3",))
    recipe = build(base, given, ROOT)
    (craft,) = recipe.methods
    assert craft.grid == {"craft.server-lr": (0.1, 0.3)}
    ((*_,), *_) = craft.settings
    flat = recipe.run_config(craft, craft.settings[0], 9)
    assert (flat["train.lr"], flat["craft.rtol"], flat["num-clients"]) == (0.7, 0.5, 3)
    searched = build(base, Given(grid=("craft.rtol=0.1,0.2",)), ROOT).methods[1]
    assert searched.grid["craft.rtol"] == (0.1, 0.2)
    assert "craft.rtol" not in searched.fixed


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (Given(algorithms=("fedavgg",)), "no algorithm 'fedavgg'; did you mean"),
        (Given(algorithms=("fedavg",), grid=("train.lr",)), "KEY=V1,V2"),
        (Given(algorithms=("fedavg",), grid=("train.rl=1",)), "no key 'train.rl'"),
        (Given(algorithms=("fedavg",), grid=("train.lr=1,2",)), "validation"),
        (Given(algorithms=("fedavg",), config=("seed=3",)), "^-c: 'seed' of a comparison comes from --seeds alone"),
        (Given(algorithms=("fedavg",), config=("algorithm=moon",)), "-c: 'algorithm' .* from --algorithms alone"),
        (Given(algorithms=("fedavg",), grid=("seed=1,2",)), "^--grid: 'seed' .* from --seeds alone"),
    ],
)
def test_wrong_flags_are_named(given: Given, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build(None, given, ROOT)


def test_a_method_that_the_recipe_lacks_is_named(base: Path) -> None:
    with pytest.raises(ConfigError, match="no method 'CRAFTT'; did you mean 'CRAFT'"):
        build(base, Given(algorithms=("CRAFTT",)), ROOT)


def test_seeds_are_whole_numbers() -> None:
    assert numbers("1, 2,3") == (1, 2, 3)
    with pytest.raises(ConfigError, match="'x'"):
        numbers("1,x")


def test_an_unknown_recipe_names_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    with pytest.raises(ConfigError, match=r"^min.toml: there is no such file; did you mean 'mine.toml'\?"):
        read(Path("min.toml"))
    with pytest.raises(ConfigError, match=r"no such file; did you mean '.*recipes/craft-cifar10-small.toml'\?"):
        read(Path("craft-cifar10-smal"))
