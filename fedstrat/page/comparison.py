"""What the folder of a ``fedstrat compare`` says about its runs: the labels of methods, and the settings chosen."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrat.experiments.cells import spell


@dataclass(frozen=True)
class Comparison:
    """A comparison, as its folder describes it.

    Attributes:
        methods: As in ``recipe.json``: label, algorithm, fixed run-config keys, grid.
        chosen: Label of a method -> its setting that validation data chose, in words.
        published: {"source": …, "rows": {label: {metric: value}}, "model": "global" or "personal"}; empty without.
    """

    methods: Sequence[Mapping[str, Any]] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)

    def method_of(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The method that a run config belongs to: of those that fit, the one that fixes most."""
        fits = [
            method
            for method in self.methods
            if method["algorithm"] == config.get("algorithm")
            and all(config.get(key) == value for key, value in method["fixed"].items())
        ]
        return max(fits, key=lambda method: len(method["fixed"]), default=None)

    def is_chosen(self, config: Mapping[str, Any]) -> bool:
        """Whether validation data chose this setting of its method."""
        method = self.method_of(config)
        if method is None:
            return False
        return self.chosen.get(method["label"]) == ", ".join(
            spell(tuple((key, config.get(key, "")) for key in method["grid"]))
        )


def read(folder: Path) -> Comparison:
    """Read ``recipe.json``, ``table.csv`` and ``published.json``, as far as they are there.

    Raises:
        OSError: One of them can't be read.
        ValueError: One of them is damaged.
    """
    recipe: dict[str, Any] = _object(folder / "recipe.json")
    published = _object(folder / "published.json") or recipe.get("published") or {}
    rows = published.get("rows", {})
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ValueError('expected {"source": …, "rows": {label: {metric: value}}}')
    methods = recipe.get("methods", [])
    if any(not {"label", "algorithm", "fixed", "grid"} <= set(method) for method in methods):
        raise ValueError("recipe.json: a method without label, algorithm, fixed or grid")
    chosen = {}
    if (folder / "table.csv").is_file():
        with (folder / "table.csv").open(encoding="utf-8", newline="") as file:
            chosen = {row.get("method", ""): row.get("setting", "") for row in csv.DictReader(file)}
    if published and "model" in recipe:
        published = {"model": recipe["model"], **published}
    return Comparison(methods, chosen if methods else {}, published)


def _object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    contents = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(contents, dict):
        raise ValueError(f"{file.name}: expected an object")  # noqa: TRY004 - as of any other damaged file
    return contents
