"""Recipes: which methods, settings and seeds a comparison runs, read from TOML.

A recipe that ``extends`` others holds only what differs: tables are merged key by key, all else is replaced; of several
the later stand above the earlier. ``published`` is replaced as a whole: numbers of two tables are never mixed.
"""

import difflib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from fedstrat.errors import ConfigError, nearest
from fedstrat.runs.keys import Table
from fedstrat.runs.overrides import Scalar

Setting = tuple[tuple[str, Scalar], ...]
"""One point of a method's grid: (run-config key, value) pairs in the order of the grid."""

PublishedRow = Mapping[str, float | str]


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        label: Its name in the table.
        algorithm: Its name in the run config.
        fixed: Run-config keys of this method alone.
        grid: Run-config key -> the values that are searched.
    """

    label: str
    algorithm: str
    fixed: Mapping[str, Scalar]
    grid: Mapping[str, tuple[Scalar, ...]]

    @property
    def settings(self) -> list[Setting]:
        """Every point of the grid, the last key varying fastest; one empty point without a grid."""
        return [tuple(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


@dataclass(frozen=True)
class Published:
    """Numbers that a paper printed.

    Attributes:
        source: Paper, table and the scale of its experiment.
        rows: Label of a method, or of a setting, -> column -> number.
    """

    source: str
    rows: Mapping[str, PublishedRow]


@dataclass(frozen=True)
class Recipe:
    """A comparison.

    Attributes:
        title: What is compared, in one line.
        about: What a reader of the table must know.
        methods: The rows; all are compared with the first.
        seeds: The seeds of every setting.
        run: Run-config keys of all runs.
        model: Whose accuracies are compared: the global model's, or the clients' personal ones.
        targets: Mean accuracies whose first round is looked for; they don't end a run.
        published: Published numbers, if there are any.
    """

    title: str
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    run: Mapping[str, Scalar]
    about: str = ""
    model: Literal["global", "personal"] = "global"
    targets: tuple[float, ...] = ()
    published: Published | None = None

    def points(self) -> Iterator[tuple[Method, Setting, int]]:
        """Every run, seed by seed, so that a part of them already compares all methods."""
        for seed in self.seeds:
            for method in self.methods:
                for setting in method.settings:
                    yield method, setting, seed

    def run_config(self, method: Method, setting: Setting, seed: int) -> dict[str, Scalar]:
        """What one run gives of the run config; the rest has its default."""
        return {**self.run, "algorithm": method.algorithm, **method.fixed, **dict(setting), "seed": seed}


class _Method(Table):
    algorithm: str
    run: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)


class _Published(Table):
    source: str
    rows: dict[str, dict[str, float | int | str]]


class _File(Table):
    title: str
    about: str = ""
    model: Literal["global", "personal"] = "global"
    seeds: list[int] = Field(min_length=1)
    targets: list[float] = Field(default_factory=list)
    only: list[str] = Field(default_factory=list)
    run: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, _Method] = Field(min_length=1)
    published: _Published | None = None


def read(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        ConfigError: It can't be read, a key is unknown or ill-typed, or it contradicts itself.
    """
    merged = _read_merged(path, ())
    try:
        file = _File(**merged)
    except ValidationError as error:
        problems = [_sentence(path, e["loc"], e["msg"]) for e in error.errors()]
        raise ConfigError("\n".join(problems)) from None
    common = _grid(path, "grid", file.grid)
    methods = {
        label: Method(
            label,
            entry.algorithm,
            _flat(path, f"methods.{label}.run", entry.run),
            common | _grid(path, f"methods.{label}.grid", entry.grid),
        )
        for label, entry in file.methods.items()
    }
    for label in file.only:
        if label not in methods:
            raise ConfigError(f"{path}: 'only' names '{label}', but there is no such method{nearest(label, methods)}")
    recipe = Recipe(
        title=file.title,
        about=" ".join(file.about.split()),
        methods=tuple(methods[label] for label in file.only or methods),
        seeds=tuple(file.seeds),
        run=_flat(path, "run", file.run),
        model=file.model,
        targets=tuple(file.targets),
        published=None if file.published is None else Published(file.published.source, file.published.rows),
    )
    check(recipe, str(path))
    return recipe


def check(recipe: Recipe, name: str) -> None:
    """Refuse what no table could be made of.

    Raises:
        ConfigError: A seed or a value occurs twice, a key is both fixed and searched, or settings would have to be
            chosen without validation data.
    """
    if len(set(recipe.seeds)) < len(recipe.seeds):
        raise ConfigError(f"{name}: expected every seed once, but 'seeds' is {list(recipe.seeds)}")
    for method in recipe.methods:
        taken = {"algorithm", "seed"} & {*recipe.run, *method.fixed, *method.grid}
        if taken:
            raise ConfigError(f"{name}: '{taken.pop()}' of '{method.label}' comes from 'methods' and 'seeds' alone")
        for key, values in method.grid.items():
            if len(set(values)) < len(values) or not values:
                raise ConfigError(f"{name}: expected the grid of '{key}' to hold each value once, got {list(values)}")
        fraction = {**recipe.run, **method.fixed}.get("dataset.validation-fraction", 0.0)
        if len(method.settings) > 1 and not fraction:
            raise ConfigError(
                f"{name}: '{method.label}' has {len(method.settings)} settings, and settings are chosen on validation"
                " data, but 'dataset.validation-fraction' is 0; set it to 0.2, say, or give one setting"
            )


def _read_merged(path: Path, extended: Sequence[Path]) -> dict[str, Any]:
    if path in extended:
        raise ConfigError(f"{path}: 'extends' goes in a circle")
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_nearest_recipe(path)} Expected a recipe in TOML.") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path} as TOML: {error}") from None
    bases = own.pop("extends", [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = _merge(merged, _read_merged(path.parent / str(base), (*extended, path)))
    return _merge(merged, own)


def _nearest_recipe(path: Path) -> str:
    """The recipe that was probably meant: beside where it was looked for, in ``recipes`` here, or in the checkout's."""
    places = (path.parent, Path("recipes"), Path(__file__).resolve().parents[2] / "recipes")
    found: dict[str, Path] = {}
    for recipe in (recipe for place in places for recipe in sorted(place.glob("*.toml"))):
        found.setdefault(recipe.stem, recipe)
    close = difflib.get_close_matches(path.name.removesuffix(".toml"), list(found), n=1, cutoff=0.5)
    return f"; did you mean '{found[close[0]]}'?" if close else "."


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key != "published"
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _flat(path: Path, where: str, table: Mapping[str, Any]) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in _leaves(table):
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(f"{path}: expected '{where}.{key}' to be a number, true, false or text, got {value!r}")
        _put(path, flat, key, value)
    return flat


def _grid(path: Path, where: str, table: Mapping[str, Any]) -> dict[str, tuple[Scalar, ...]]:
    grid: dict[str, tuple[Scalar, ...]] = {}
    for key, value in _leaves(table):
        if not isinstance(value, list) or not all(isinstance(v, bool | int | float | str) for v in value):
            raise ConfigError(f"{path}: expected '{where}.{key}' to be a list of values, got {value!r}")
        _put(path, grid, key, tuple(value))
    return grid


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _put(path: Path, flat: dict[str, Any], key: str, value: Any) -> None:
    if key in flat:
        raise ConfigError(f"{path}: '{key}' is given twice, once within quotes; write it as a table's key in both")
    flat[key] = value


def _sentence(path: Path, location: tuple[int | str, ...], message: str) -> str:
    name = ".".join(str(part) for part in location)
    if message.startswith("Extra inputs"):
        siblings = _Method.model_fields if location[0] == "methods" else _File.model_fields
        return f"{path}: there is no key '{name}'{nearest(str(location[-1]), siblings)}"
    return f"{path}: '{name}': {message[:1].lower()}{message[1:]}"
