"""Results folders -> runs that are alike but for the seed, side by side."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstrat.errors import ConfigError, FedstratError
from fedstrat.page.comparison import Comparison
from fedstrat.page.comparison import read as read_comparison
from fedstrat.runs.follow import LOG_NAME
from fedstrat.runs.goals import Goals
from fedstrat.runs.history import Recorded, load
from fedstrat.runs.keys import ELSEWHERE, algorithms

IGNORED = ELSEWHERE | {"seed"}
"""Keys of the run config in which the runs of a group may differ: they don't say what is computed."""

_MISSING = "–"
_COUNTS = {"num-server-rounds": "rounds", "num-clients": "clients"}


@dataclass(frozen=True)
class Run:
    """One run, read back.

    Attributes:
        recorded: Its folder's contents.
        config: The run config that it ended with, without the tables of algorithms that it doesn't use.
    """

    recorded: Recorded
    config: Mapping[str, Any]

    @property
    def history(self) -> list[dict[str, Any]]:
        """Its rounds."""
        return self.recorded.history

    @property
    def seed(self) -> Any:
        """Its seed."""
        return self.config.get("seed", _MISSING)

    @property
    def started(self) -> str:
        """When it began, in UTC; "" where that wasn't written down."""
        return str(self.recorded.config.get("started", ""))

    @property
    def complete(self) -> bool:
        """Whether it ended by itself."""
        return (self.recorded.summary or {}).get("status") == "completed"

    @property
    def usable(self) -> bool:
        """Whether it has a model to speak of: it didn't fail, and a round of it succeeded."""
        failed = (self.recorded.summary or {}).get("status") == "failed"
        return not failed and any(line["aggregated"] for line in self.history)

    @property
    def status(self) -> str:
        """How it ended, and why, in words."""
        summary, wanted = self.recorded.summary, self.config.get("num-server-rounds")
        done = self.history[-1]["round"] if self.history else 0
        after = f"after round {done} of {wanted}" if wanted else f"after round {done}"
        if summary is None and not self.history:
            return "still going, or killed before its first round ended"
        if summary is None:
            return f"still going, or killed: no summary.json; what is shown is the state {after}"
        if not self.complete:
            return f"{summary.get('status', 'ended')} {after}: {summary.get('error') or 'no reason was written down'}"
        if isinstance(wanted, int) and done < wanted:
            return f"ended early, {after}: {self._goal() or 'the reason was not written down'}"
        return "completed"

    def _goal(self) -> str:
        goals = Goals(float(self.config.get("target-accuracy", 0.0)), int(self.config.get("patience", 0)))
        for line in self.history:
            goals.take(line["round"], line.get("mean"))
        return goals.reason


@dataclass(frozen=True)
class Group:
    """Runs whose configs are alike but for the seed and for where files lie.

    Attributes:
        label: The name, with the settings that tell it from other groups of the same one.
        runs: In the order of their seeds.
        name: What a comparison calls the method; else the algorithm.
    """

    label: str
    runs: tuple[Run, ...]
    name: str = ""

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of the first run."""
        return self.runs[0].config

    @property
    def algorithm(self) -> str:
        """The key of the algorithm."""
        return str(self.config.get("algorithm", "run"))


@dataclass(frozen=True)
class Gathered:
    """Everything that a page is made of.

    Attributes:
        groups: In the order of a comparison's methods, else in which their first runs were named.
        problems: Sentences about folders that couldn't be used.
        published: Published numbers beside ours: {"source": ..., "rows": {label: {metric: value}}}; {} without.
        note: What was left out on purpose, and why; empty where nothing was.
    """

    groups: tuple[Group, ...]
    problems: tuple[str, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def gather(folders: Iterable[Path]) -> Gathered:
    """Read results folders.

    Args:
        folders: Results folders, or folders that hold some at any depth (those of a comparison).

    Raises:
        ConfigError: None of them holds a run that can be read.
    """
    runs: dict[Path, Run] = {}
    problems: list[str] = []
    comparison = Comparison()
    for folder in folders:
        found = _run_folders(folder)
        logs = [] if found == [folder] else _folders_with(folder, LOG_NAME)
        lone = [path for path in logs if not (path / "config.json").is_file()]
        problems += [
            f"{path} was left out: it has {LOG_NAME} but no config.json, so the run ended before it began, or is just"
            f" beginning; the end of {LOG_NAME} tells which."
            for path in lone
        ]
        if not found and not lone:
            problems.append(f"{folder} holds no run: there is no config.json in it or below it.")
        for path in found:
            try:
                run = _read(path)
            except (FedstratError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
                problems.append(f"{path} was left out: {_sentence(error)}")
            else:
                runs.setdefault(path.resolve(), run)
        try:
            one = read_comparison(folder)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            problems.append(f"What {folder} says about a comparison was left out: {_sentence(error)}")
        else:
            comparison = comparison if comparison.methods or comparison.published else one
    if not runs:
        raise ConfigError("no run to report on:\n" + "\n".join(problems))
    usable = [run for run in runs.values() if run.usable]
    if usable:  # else the page tells of what there is
        problems += _unusable([run for run in runs.values() if not run.usable])
    groups = [_one_a_seed(group, problems) for group in _grouped(usable or list(runs.values()), comparison)]
    chosen = [group for group in groups if comparison.is_chosen(group.config)]
    if not chosen or len(chosen) == len(groups):
        return Gathered(_labelled(groups), tuple(problems), comparison.published)
    note = (
        f"Of {len(groups)} settings this page shows the {len(chosen)} that validation data chose, one of each method;"
        " the comparison's own tables hold all."
    )
    return Gathered(_labelled(chosen), tuple(problems), comparison.published, note)


def differing(groups: Iterable[Group], among: Iterable[str] = ()) -> list[str]:
    """Return the keys of the run config in which groups differ, in alphabetical order.

    Args:
        groups: The groups.
        among: Keys to look at; all where none is named.
    """
    configs = [_deciding(group.config) for group in groups]
    names = sorted(among or {name for config in configs for name in config})
    return [name for name in names if len({_text(config.get(name, _MISSING)) for config in configs}) > 1]


def _run_folders(folder: Path) -> list[Path]:
    if (folder / "config.json").is_file():
        return [folder]
    return _folders_with(folder, "config.json")


def _folders_with(folder: Path, name: str) -> list[Path]:
    return sorted(path.parent for path in folder.rglob(name))


def _read(path: Path) -> Run:
    recorded = load(path)
    last = (recorded.config.get("resumed") or [recorded.config])[-1]
    config = dict(last["run_config"])
    for line in recorded.history:  # whatever a page reads must be there
        for name in ("round", "mean", "loss", "train", "total_bytes", "aggregated"):
            if name not in line:
                raise KeyError(name)
    return Run(recorded, _used(config))


def _used(config: Mapping[str, Any]) -> dict[str, Any]:
    algorithm = config.get("algorithm")
    used = {algorithm, config.get(f"{algorithm}.aggregator")}
    unused = tuple(f"{name}." for name in algorithms() if name not in used)
    return {name: value for name, value in sorted(config.items()) if not name.startswith(unused)}


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in IGNORED}


def _grouped(runs: list[Run], comparison: Comparison) -> list[Group]:
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(_text(_deciding(run.config)), []).append(run)
    groups = [Group("", tuple(sorted(some, key=lambda run: _order(run.seed)))) for some in alike.values()]
    methods = [comparison.method_of(group.config) or {"label": group.algorithm} for group in groups]
    named = [replace(group, name=method["label"]) for group, method in zip(groups, methods, strict=True)]
    places = {method["label"]: place for place, method in enumerate(comparison.methods)}
    return sorted(named, key=lambda group: places.get(group.name, len(places)))


def _unusable(runs: list[Run]) -> list[str]:
    if not runs:
        return []
    reasons: dict[str, list[str]] = {}
    for run in runs:
        reason = "no round of it succeeded" if run.status == "completed" else " ".join(run.status.split())
        who = f"{run.config.get('algorithm', 'run')}, seed {run.seed} ({run.recorded.path.name})"
        reasons.setdefault(reason if len(reason) <= 200 else f"{reason[:199]}…", []).append(who)
    told = "; ".join(f"{', '.join(who)}: {reason.rstrip('.')}" for reason, who in reasons.items())
    return [f"{len(runs)} run{'s have' if len(runs) > 1 else ' has'} no row and no curve here. {told}."]


def _one_a_seed(group: Group, problems: list[str]) -> Group:
    """Of the runs of one seed the newest complete one; a run made twice says nothing about other seeds."""
    newest: dict[str, Run] = {}
    for run in sorted(group.runs, key=lambda run: (run.complete, run.started)):
        newest[_text(run.seed)] = run
    kept = tuple(run for run in group.runs if newest[_text(run.seed)] is run)
    if others := len(group.runs) - len(kept):
        problems.append(
            f"{group.name}: {others} repeated {'runs were' if others > 1 else 'run was'} left out; of runs with one"
            " seed and equal settings the newest complete one is shown."
        )
    return replace(group, runs=kept)


def _labelled(groups: list[Group]) -> tuple[Group, ...]:
    return tuple(replace(group, label=_label(group, groups)) for group in groups)


def _label(group: Group, groups: list[Group]) -> str:
    """The name, the data set where there are several, and of the settings only what tells the group apart."""
    told = []
    if len({_text(other.config.get("dataset.name")) for other in groups}) > 1:
        told.append("dataset.name")
    rivals = [other for other in groups if other.name == group.name]
    told = _telling(rivals, told)
    ends = [name.rpartition(".")[2] for name in told]
    words = []
    for name, end in zip(told, ends, strict=True):
        value = _shown(group.config.get(name, _MISSING))
        if name == "dataset.name":
            words.append(value)
        elif name in _COUNTS:
            words.append(f"{value} {_COUNTS[name]}")
        else:
            words.append(f"{name if ends.count(end) > 1 else end} {value}")
    return ", ".join([group.name, *words])


def _telling(rivals: list[Group], told: list[str]) -> list[str]:
    """Add settings, each time the one that tells most rivals apart, until all are told apart."""

    def kinds(names: list[str]) -> int:
        return len({tuple(_text(rival.config.get(name, _MISSING)) for name in names) for rival in rivals})

    left = [name for name in differing(rivals) if name not in told]
    while left and kinds(told) < len(rivals):
        best = max(left, key=lambda name: kinds([*told, name]))
        left.remove(best)
        told = [*told, best]
    return told


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _order(seed: Any) -> tuple[bool, float, str]:
    number = isinstance(seed, int | float)
    return (not number, float(seed) if number else 0.0, str(seed))


def _sentence(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"a part of it is missing ({error})."
    return f"{str(error) or type(error).__name__}".rstrip(".") + "."
