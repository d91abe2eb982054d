"""The recipes that come with the project: every cell is a valid run config, and full scale is the papers' scale."""

from pathlib import Path
from typing import Any

import pytest

from fedstrat.experiments.recipe import Recipe, read
from fedstrat.runs import config

FOLDER = Path(__file__).parents[2] / "recipes"
FILES = sorted(FOLDER.glob("*.toml"))
FULL = [path for path in FILES if not path.stem.endswith("-small")]


def resolved(recipe: Recipe, label: str | None = None) -> list[dict[str, Any]]:
    return [
        dict(config.parse(recipe.run_config(method, setting, seed)).flat)
        for method, setting, seed in recipe.points()
        if seed == recipe.seeds[0] and label in (None, method.label)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_cell_is_a_valid_run_config(path: Path) -> None:
    recipe = read(path)
    assert resolved(recipe)
    assert recipe.published is not None
    assert recipe.title
    assert all("dataset.dir" not in {*recipe.run, *method.fixed, *method.grid} for method in recipe.methods)


def test_every_full_recipe_has_a_small_twin_with_its_published_numbers() -> None:
    assert {path.stem for path in FILES} == {path.stem + end for path in FULL for end in ("", "-small")}
    for path in FULL:
        full, small = read(path), read(FOLDER / f"{path.stem}-small.toml")
        assert small.published == full.published
        assert small.model == full.model
        assert {m.algorithm for m in small.methods} <= {m.algorithm for m in full.methods}
        assert "in small" in small.title
        rounds = [recipe.run["num-server-rounds"] for recipe in (full, small)]
        assert rounds[1] < rounds[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_published_rows_are_those_of_methods(path: Path) -> None:
    recipe = read(path)
    assert recipe.published is not None
    labels = {method.label for method in recipe.methods} | {m.label for m in read_full(path).methods}
    for row in recipe.published.rows:
        assert row in labels or row.partition(", round ")[0] in labels, row


def read_full(path: Path) -> Recipe:
    return read(FOLDER / f"{path.stem.removesuffix('-small')}.toml")


# --- full scale is the papers' scale: numbers as the papers and their authors' code give them --------------

CRAFT = {
    "num-server-rounds": 501, "num-clients": 1000, "fraction-train": 0.1, "dataset.alpha": 0.1, "train.local-epochs": 1,
    "train.batch-size": 20, "train.lr-schedule": "exponential", "train.lr-decay": 0.999, "train.momentum": 0.0,
    "train.weight-decay": 0.0, "dataset.test-fraction": 0.2,
}  # fmt: skip
TOPPED_UP = {"dataset.partition": "dirichlet", "dataset.min-size": 20}
FEDVSSAM = {
    "num-server-rounds": 800, "num-clients": 100, "fraction-train": 0.1, "train.lr": 0.1,
    "train.lr-schedule": "exponential", "train.lr-decay": 0.998, "train.batch-size": 50, "train.local-epochs": 5,
    "train.weight-decay": 1e-3, "train.clip-norm": 10.0,
}  # fmt: skip
FEDCSPACK = {
    "num-server-rounds": 100, "num-clients": 20, "fraction-train": 0.3, "train.lr": 0.05, "train.batch-size": 16,
    "train.local-epochs": 3, "dataset.partition": "fedcspack",
}  # fmt: skip
SCALES: dict[str, dict[str, Any]] = {
    "craft-cifar10": CRAFT | TOPPED_UP | {"dataset.name": "cifar10", "model.name": "resnet20"},
    "craft-femnist": CRAFT | {
        "dataset.name": "femnist", "dataset.partition": "craft", "model.name": "mlp", "model.hidden": "200,200",
    },
    "craft-depth": CRAFT | TOPPED_UP | {"dataset.name": "cifar10"},
    "craft-ditto-cifar10": CRAFT | TOPPED_UP | {"dataset.name": "cifar10", "model.name": "resnet20"},
    "craft-ditto-cifar100": CRAFT | TOPPED_UP | {"dataset.name": "cifar100", "model.name": "resnet20"},
    "craft-parity": CRAFT | TOPPED_UP | {
        "dataset.name": "cifar10", "model.name": "resnet20", "train.lr": 0.005, "craft.server-lr": 0.1, "seed": 77,
        "craft.single-client": "raw", "dataset.validation-fraction": 0.0,
    },
    "craft-parity-cifar100": CRAFT | TOPPED_UP | {
        "dataset.name": "cifar100", "model.name": "resnet20", "train.lr": 0.05, "craft.server-lr": 1.0, "seed": 77,
    },
    **{
        f"fedvssam-{name}-{split}": FEDVSSAM | kind | {
            "dataset.name": name, "model.name": model, "num-server-rounds": 300 if name == "dbpedia14" else 800,
        }
        for name, model in (("cifar10", "resnet18"), ("cifar100", "wrn28-4"), ("dbpedia14", "textcnn"))
        for split, kind in {
            "dir0.5": {"dataset.partition": "fedvssam-dirichlet", "dataset.alpha": 0.5},
            "dir0.1": {"dataset.partition": "fedvssam-dirichlet", "dataset.alpha": 0.1},
            **{f"path{c}": {"dataset.partition": "fedvssam-pathological", "dataset.classes-per-client": c}
               for c in (3, 6, 10, 20)},
        }.items()
        if (FOLDER / f"fedvssam-{name}-{split}.toml").exists()
    },
    "fedvssam-ablation": FEDVSSAM | {
        "dataset.name": "cifar10", "model.name": "resnet18", "dataset.partition": "fedvssam-dirichlet",
        "dataset.alpha": 0.1, "fedvssam.rho": 0.05, "fedvssam.gamma-l": 0.1,
    },
    "fedcspack-fmnist": FEDCSPACK | {
        "dataset.name": "fashion-mnist", "dataset.alpha": 0.3, "model.name": "cnn-fashion",
    },
    "fedcspack-cifar10": FEDCSPACK | {"dataset.name": "cifar10", "dataset.alpha": 0.3, "model.name": "cnn-cifar"},
    "fedcspack-cifar100": FEDCSPACK | {"dataset.name": "cifar100", "dataset.alpha": 0.3, "model.name": "cnn-cifar"},
    "fedcspack-emnist": FEDCSPACK | {"dataset.name": "emnist", "dataset.alpha": 0.6, "model.name": "cnn-emnist"},
    "fedcspack-cifar10-dir1": FEDCSPACK | {"dataset.name": "cifar10", "dataset.alpha": 1.0},
    "fedcspack-cifar100-dir1": FEDCSPACK | {"dataset.name": "cifar100", "dataset.alpha": 1.0},
    "fedcspack-bytes-emnist": FEDCSPACK | {"dataset.name": "emnist", "dataset.alpha": 0.3, "model.name": "cnn-emnist"},
    "fedcspack-bytes-cifar100": FEDCSPACK | {
        "dataset.name": "cifar100", "dataset.alpha": 0.3, "model.name": "resnet18",
    },
    "fedcspack-ablation": FEDCSPACK | {"dataset.name": "cifar10", "dataset.alpha": 0.5, "model.name": "cnn-cifar"},
    "scaffold-one-class": {  # everybody takes part, with one class each: all that the tutorial says
        "fraction-train": 1.0, "dataset.partition": "pathological", "dataset.classes-per-client": 1,
    },
}  # fmt: skip


def test_no_full_recipe_is_left_out() -> None:
    assert {path.stem for path in FULL} == set(SCALES)
    assert sum(name.startswith("fedvssam-") for name in SCALES) == 11  # ten columns and the ablation


@pytest.mark.parametrize("path", FULL, ids=lambda p: p.stem)
def test_full_scale_is_the_papers(path: Path) -> None:
    recipe = read(path)
    for method, setting, seed in recipe.points():
        given = {**config.defaults(), **recipe.run_config(method, setting, seed)}
        expected = SCALES[path.stem]
        assert {key: given[key] for key in expected} == expected, method.label


def test_craft_searches_what_its_authors_searched_and_is_compared_with_the_control() -> None:
    recipe = read(FOLDER / "craft-cifar10.toml")
    methods = {method.label: method for method in recipe.methods}
    assert methods["CRAFT"].grid == {"train.lr": (0.005, 0.01, 0.05, 0.1), "craft.server-lr": (0.01, 0.1, 1.0)}
    assert methods["Normalised FedAvgM"].grid["normalisedfedavgm.server-lr"] == (0.01, 0.1, 1.0)
    assert {row["normalisedfedavgm.length"] for row in resolved(recipe, "Normalised FedAvgM")} == {"unit"}


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("craft-") and p.stem.endswith("-small")])
def test_small_twins_of_craft_search_the_server_rate_and_show_when_it_leaves_chance_level(path: Path) -> None:
    recipe = read(path)
    searched = [m.grid["craft.server-lr"] for m in recipe.methods if "craft.server-lr" in m.grid]
    assert all({0.01, 0.03, 0.1} <= set(values) for values in searched)
    assert searched or "parity" in path.stem
    assert recipe.targets[0] == 0.2  # twice chance level of 10 classes


def test_the_ablation_of_fedvssam_switches_one_part_after_the_other() -> None:
    rows = {
        method.label: {key.partition(".")[2]: value for key, value in method.fixed.items()}
        for method in read(FOLDER / "fedvssam-ablation.toml").methods
    }
    parts = {
        label: (row.get("perturb", "mixed") == "mixed", row.get("update", "mixed") == "mixed", row["gamma-g"] < 1.0)
        for label, row in rows.items()
    }
    assert parts == {
        "base": (False, False, False),
        "GU": (False, False, True),
        "LU+GU": (False, True, True),
        "LF+LU": (True, True, False),
        "FedVSSAM": (True, True, True),
    }


def test_strong_heterogeneity_has_the_smaller_gamma() -> None:
    for path in FULL:
        if path.stem.startswith("fedvssam-") and path.stem != "fedvssam-ablation":
            (row,) = resolved(read(path), "FedVSSAM")
            strong = path.stem.endswith(("dir0.1", "path3", "path10"))
            assert (row["fedvssam.rho"], row["fedvssam.gamma-l"], row["fedvssam.gamma-g"]) == (
                0.05,
                0.1 if strong else 0.4,
                0.6,
            )


PUBLISHED = {
    ("craft-cifar10", "CRAFT"): {"mean": 0.806, "best10": 1.0, "worst10": 0.479, "std": 0.159},
    ("craft-cifar10", "ConFIG"): {"mean": 0.525, "best10": 0.872, "worst10": 0.146, "std": 0.211},
    ("craft-cifar10", "FedLF"): {"mean": 0.501, "best10": 0.845, "worst10": 0.149, "std": 0.208},
    ("craft-femnist", "FedAvgM"): {"mean": 0.655, "best10": 0.843, "worst10": 0.408, "std": 0.125},
    ("craft-femnist", "CRAFT"): {"mean": 0.706, "best10": 0.878, "worst10": 0.474, "std": 0.115},
    ("craft-depth", "CRAFT, ResNet-56"): {"mean": 0.823, "worst10": 0.5, "std": 0.154},
    ("craft-depth", "FedAvg, ResNet-110"): {"mean": 0.325, "worst10": 0.0, "std": 0.201},
    ("craft-parity", "CRAFT, round 100"): {"mean": 0.564, "loss": 1.106},
    ("craft-parity", "CRAFT, round 500"): {"mean": 0.806, "loss": 0.407, "std": 0.164},
    ("fedvssam-cifar10-dir0.5", "FedVSSAM"): {"accuracy %": "83.56 ± 0.19", "rounds to 75 %": 111},
    ("fedvssam-cifar100-path10", "FedSMOO"): {"accuracy %": "48.60 ± 0.18", "rounds to 40 %": 463},
    ("fedvssam-dbpedia14-path3", "FedAvg"): {"accuracy %": "91.09 ± 0.11", "rounds to 90 %": 215},
    ("fedcspack-emnist", "FedCSPACK"): {"accuracy %": 86.26},
    ("fedcspack-cifar10-dir1", "FedCSPACK"): {"accuracy %": 78.71},
    ("fedcspack-bytes-emnist", "FedSPU"): {"GB": 4.29, "hours": 13.92},
    ("fedcspack-ablation", "both"): {"round 10": 0.33, "round 50": 0.71, "round 100": 0.79},
}


@pytest.mark.parametrize(("name", "label"), PUBLISHED)
def test_published_numbers(name: str, label: str) -> None:
    published = read(FOLDER / f"{name}.toml").published
    assert published is not None
    assert published.rows[label] == PUBLISHED[name, label]


def test_published_tables_are_never_mixed() -> None:
    published = read(FOLDER / "craft-femnist-small.toml").published
    assert published is not None
    assert "FedLF" not in published.rows  # which has a row in the table on CIFAR-10 that this recipe extends
