"""A recipe as the command line asks for it: from a file, from flags, or from a file that flags change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedstrat.errors import ConfigError, nearest
from fedstrat.experiments.recipe import Method, Recipe, check, read
from fedstrat.runs.keys import algorithms
from fedstrat.runs.overrides import Scalar, read_app, read_pairs


@dataclass(frozen=True)
class Given:
    """What the flags say; empty means that they don't.

    Attributes:
        algorithms: Algorithms, or labels of the recipe's methods.
        seeds: Seeds.
        grid: Texts ``KEY=V1,V2``.
        config: The arguments of ``-c``.
        targets: Mean accuracies whose first round is looked for.
    """

    algorithms: Sequence[str] = ()
    seeds: Sequence[int] = ()
    grid: Sequence[str] = ()
    config: Sequence[str] = ()
    targets: Sequence[float] = ()


def build(path: Path | None, given: Given, app: Path) -> Recipe:
    """Make the recipe; flags stand above the file.

    Raises:
        ConfigError: The file, a flag or their combination isn't valid.
    """
    defaults = read_app(app)
    if path is None:
        recipe = Recipe(_title(given), tuple(_method(name) for name in given.algorithms), (1,), {})
    else:
        recipe = read(path)
        recipe = replace(recipe, methods=_chosen(recipe, given.algorithms))
    fixed = read_pairs(given.config, defaults)
    grids = dict(_grid(text, defaults) for text in given.grid)
    for key, flag in (("algorithm", "--algorithms"), ("seed", "--seeds")):
        if key in fixed or key in grids:
            given_by = "-c" if key in fixed else "--grid"
            raise ConfigError(
                f"{given_by}: '{key}' of a comparison comes from {flag} alone; leave it out of {given_by}"
            )
    recipe = replace(
        recipe,
        methods=tuple(_changed(method, fixed, grids) for method in recipe.methods),
        seeds=tuple(given.seeds) or recipe.seeds,
        run={**recipe.run, **fixed},
        targets=tuple(given.targets) or recipe.targets,
    )
    check(recipe, "flags" if path is None else str(path))
    return recipe


def names(text: str) -> tuple[str, ...]:
    """Split a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    """Split a list of seeds.

    Raises:
        ConfigError: One of them isn't a whole number.
    """
    found = names(text)
    if wrong := [part for part in found if not part.isdecimal()]:
        raise ConfigError(f"--seeds: expected whole numbers with commas, such as 1,2,3, but got '{wrong[0]}'")
    return tuple(int(part) for part in found)


def _title(given: Given) -> str:
    return f"{' against '.join(given.algorithms)}"


def _method(name: str) -> Method:
    if name not in algorithms():
        raise ConfigError(f"--algorithms: there is no algorithm '{name}'{nearest(name, algorithms())}")
    return Method(algorithms()[name].strategy.__name__, name, {}, {})


def _chosen(recipe: Recipe, wanted: Sequence[str]) -> tuple[Method, ...]:
    for name in wanted:
        known = {method.label: method.algorithm for method in recipe.methods}
        if name not in known and name not in known.values():
            raise ConfigError(f"--algorithms: the recipe has no method '{name}'{nearest(name, known)}")
    return tuple(m for m in recipe.methods if not wanted or m.label in wanted or m.algorithm in wanted)


def _grid(text: str, defaults: dict[str, Scalar]) -> tuple[str, tuple[Scalar, ...]]:
    key, equals, values = text.partition("=")
    if not equals or not names(values):
        raise ConfigError(f"--grid {text!r}: expected KEY=V1,V2, such as train.lr=0.03,0.1")
    return key, tuple(read_pairs([f"{key}={value}"], defaults)[key] for value in names(values))


def _changed(method: Method, fixed: dict[str, Scalar], grids: dict[str, tuple[Scalar, ...]]) -> Method:
    own = {
        key: values
        for key, values in grids.items()
        if key.partition(".")[0] not in algorithms() or key.partition(".")[0] == method.algorithm
    }
    searched = {key: values for key, values in {**method.grid, **own}.items() if key not in fixed or key in own}
    return replace(
        method,
        fixed={key: value for key, value in method.fixed.items() if key not in fixed and key not in own},
        grid=searched,
    )
