"""Cells: the runs of a comparison, each an ordinary results folder whose name holds the identity of its run config."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedstrat.errors import ConfigError
from fedstrat.experiments.recipe import Method, Recipe, Setting
from fedstrat.experiments.selection import SCORES, Outcome, Reached
from fedstrat.runs import config, history
from fedstrat.runs.keys import ELSEWHERE, algorithms
from fedstrat.runs.overrides import Scalar

Standing = Literal["new", "completed", "failed", "interrupted"]


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    Attributes:
        method: Its method.
        setting: Its point of the method's grid.
        seed: Its seed.
        given: What it gives of the run config.
        folder: Its results folder.
    """

    method: Method
    setting: Setting
    seed: int
    given: Mapping[str, Scalar]
    folder: Path

    def __str__(self) -> str:
        return ", ".join([self.method.label, *spell(self.setting), f"seed {self.seed}"])


def make_cells(recipe: Recipe, defaults: Mapping[str, Scalar], folder: Path) -> list[Cell]:
    """Every run of a recipe, in the order in which they are made.

    Args:
        recipe: The recipe.
        defaults: The app's run config.
        folder: Where the results folders are.

    Raises:
        ConfigError: A run config isn't valid; names the method and the setting.
    """
    cells = []
    for method, setting, seed in recipe.points():
        given = recipe.run_config(method, setting, seed)
        try:
            flat = config.parse({**defaults, **given}).flat
        except ConfigError as error:
            where = ", ".join([method.label, *spell(setting)])
            raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None
        name = "-".join([_slug(method.label), *map(_slug, spell(setting)), f"seed{seed}", identity(flat)])
        cells.append(Cell(method, setting, seed, given, folder / name))
    return cells


def identity(flat: Mapping[str, Scalar]) -> str:
    """Eight hexadecimal digits that differ between run configs which compute different things.

    Args:
        flat: A whole run config; tables of algorithms that it doesn't use don't count.
    """
    used = {flat["algorithm"], flat.get(f"{flat['algorithm']}.aggregator")}
    unused = tuple(f"{name}." for name in algorithms() if name not in used)
    own = {key: value for key, value in flat.items() if key not in ELSEWHERE and not key.startswith(unused)}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:8]


def spell(setting: Setting) -> list[str]:
    """A setting in words, such as ``["lr 0.1", "server-lr 0.3"]``."""
    return [f"{key.rpartition('.')[2]} {value:g}" if isinstance(value, float) else
            f"{key.rpartition('.')[2]} {value}" for key, value in setting]  # fmt: skip


def standing(folder: Path) -> Standing:
    """How far a cell is: what ended without a verdict counts as interrupted."""
    if not (folder / "config.json").exists():
        return "new"
    summary = history.load(folder).summary
    status: Standing = summary["status"] if summary else "interrupted"
    return status


def clear(folder: Path) -> None:
    """Remove a cell's folder, where there is one."""
    if folder.exists():
        shutil.rmtree(folder)


def can_resume(folder: Path) -> bool:
    """Whether an interrupted cell has a checkpoint to go on from."""
    return any((folder / "checkpoints").glob("round-*.safetensors"))


def lighten(folder: Path) -> None:
    """Remove what only a resume needs of a finished cell: checkpoints and the clients' state, often gigabytes."""
    for name in ("checkpoints", "state"):
        shutil.rmtree(folder / name, ignore_errors=True)


def read_outcome(cell: Cell, recipe: Recipe) -> Outcome:
    """What a cell came to; one without a verdict is missing."""
    status = standing(cell.folder)
    if status in ("new", "interrupted"):
        return Outcome(cell.method.label, cell.setting, cell.seed)
    run = history.load(cell.folder)
    summary = run.summary or {}
    personal = recipe.model == "personal"
    scored = [(line, scores) for line in run.history if (scores := _scores(line, personal)) is not None]
    last = scored[-1][1] if scored else None
    total = run.history[-1]["total_bytes"] if run.history else {}
    validation = summary.get("validation_personal" if personal else "validation")
    return Outcome(
        method=cell.method.label,
        setting=cell.setting,
        seed=cell.seed,
        status="completed" if status == "completed" else "failed",
        validation=None if validation is None else validation["mean"],
        final=None if last is None else {name: last[name] for name in SCORES},
        best=max((scores["mean"] for _, scores in scored), default=None),
        diverged=status == "completed" and last is not None and _infinite(last["loss"]),
        reached=tuple(
            next(
                (Reached(line["round"], _bytes(line["total_bytes"])) for line, s in scored if s["mean"] >= target),
                None,
            )
            for target in recipe.targets
        ),
        up_bytes=total.get("train_up_payload", 0),
        down_bytes=total.get("train_down_payload", 0),
        seconds=run.history[-1]["total_seconds"] if run.history else 0.0,
    )


def _scores(line: Mapping[str, Any], personal: bool) -> Mapping[str, Any] | None:
    scores: Mapping[str, Any] | None = line.get("personal") if personal else line
    return scores if scores is not None and scores["mean"] is not None else None


def _infinite(loss: float | None) -> bool:
    return loss is None or not math.isfinite(loss)  # the history writes NaN and infinity as null


def _bytes(total: Mapping[str, int]) -> int:
    return total["train_up_payload"] + total["train_down_payload"]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
