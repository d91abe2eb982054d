"""From finished runs to rows: the setting that validation chose, its test scores over seeds, paired differences.

Pure functions of what the runs came to. A failed or diverged run is counted and keeps its place in the mean over the
grid; a setting with a failed run can't be chosen.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from scipy.special import stdtrit

from fedstrat.experiments.recipe import Method, Setting

SCORES = ("mean", "best10", "worst10", "std")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Reached:
    """When a target accuracy was first reached.

    Attributes:
        round: The round.
        bytes: Payload of all training messages until then, both directions together.
    """

    round: int
    bytes: int


@dataclass(frozen=True)
class Outcome:
    """What one run came to.

    Attributes:
        method: Label of its method.
        setting: Its point of the grid.
        seed: Its seed.
        status: Whether it completed, failed, or wasn't made (to its end) yet.
        validation: Mean client accuracy of the final model on data held back from training.
        final: Test scores of the last evaluation, by the names of ``SCORES``; also of a failed run, where it had one.
        best: Highest mean test accuracy of all rounds.
        diverged: Whether the final loss is infinite or NaN.
        reached: When each target was reached; None for never.
        up_bytes: Payload that clients sent for training.
        down_bytes: Payload that clients were sent for training.
        seconds: Duration of all rounds.
    """

    method: str
    setting: Setting
    seed: int
    status: Literal["completed", "failed", "missing"] = "missing"
    validation: float | None = None
    final: Mapping[str, float] | None = None
    best: float | None = None
    diverged: bool = False
    reached: tuple[Reached | None, ...] = ()
    up_bytes: int = 0
    down_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (NaN for n = 1) over n seeds."""

    mean: float
    std: float
    n: int


@dataclass(frozen=True)
class Paired:
    """Differences to the first method, seed by seed: same partition, initial model and cohorts.

    Attributes:
        spread: Mean and standard deviation of the differences.
        low: Lower end of the two-sided 95 % t-interval of the mean difference; NaN for n = 1.
        high: Its upper end.
        wins: Seeds with a higher mean accuracy than the first method.
        losses: Seeds with a lower one.
    """

    spread: Spread
    low: float
    high: float
    wins: int
    losses: int


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        method: The method.
        setting: The chosen setting; None where none can be chosen yet, or at all.
        why_none: Why none was chosen; empty if one was.
        validation: Mean validation accuracy over seeds that chose it; None where there was only one setting.
        scores: Test score -> spread over seeds of the chosen setting.
        best: Spread of the best round's mean; optimistic, since test data chose the round.
        reached: Per target, when each seed of the chosen setting reached it.
        up_bytes: Mean over seeds.
        down_bytes: Mean over seeds.
        seconds: Mean over seeds.
        grid_mean: Mean final test accuracy over all settings and seeds. A failed run counts with its last evaluation,
            0 where it had none.
        edges: Searched keys whose chosen value is the smallest or largest of its grid.
        num_runs: Runs of this method in the recipe.
        num_failed: Of these, failed ones.
        num_diverged: Of the completed ones, those with an infinite final loss.
        num_missing: Not made yet.
        chosen: The runs of the chosen setting, in the order of the seeds.
    """

    method: Method
    setting: Setting | None
    why_none: str
    validation: float | None = None
    scores: Mapping[str, Spread] = field(default_factory=dict)
    best: Spread | None = None
    reached: tuple[tuple[Reached | None, ...], ...] = ()
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    seconds: float = 0.0
    grid_mean: float | None = None
    edges: tuple[str, ...] = ()
    num_runs: int = 0
    num_failed: int = 0
    num_diverged: int = 0
    num_missing: int = 0
    chosen: tuple[Outcome, ...] = ()


def make_row(method: Method, seeds: Sequence[int], outcomes: Sequence[Outcome]) -> Row:
    """Choose a method's setting on validation data and sum up its test scores.

    The highest validation accuracy, averaged over the seeds that are finished for every setting, wins; of equals the
    first in the grid's order.

    Args:
        method: Whose row.
        seeds: The seeds of every setting.
        outcomes: Runs, of this and other methods, in any order; those that aren't there are missing.
    """
    found = {(o.setting, o.seed): o for o in outcomes if o.method == method.label}
    runs = [found.get((s, seed), Outcome(method.label, s, seed)) for s in method.settings for seed in seeds]
    made = [run for run in runs if run.status != "missing"]
    finished = [seed for seed in seeds if sum(run.seed == seed for run in made) == len(method.settings)]
    by_setting = {s: tuple(found[s, seed] for seed in finished) for s in method.settings} if finished else {}
    row = Row(
        method=method,
        setting=None,
        why_none="",
        grid_mean=statistics.fmean(run.final["mean"] if run.final else 0.0 for run in made) if made else None,
        num_runs=len(runs),
        num_failed=sum(run.status == "failed" for run in runs),
        num_diverged=sum(run.diverged for run in runs),
        num_missing=len(runs) - len(made),
    )
    setting, why = _choose(by_setting)
    if setting is None:
        return replace(row, why_none=why)
    chosen = by_setting[setting]
    validations = [run.validation for run in chosen if run.validation is not None]
    return replace(
        row,
        setting=setting,
        chosen=chosen,
        validation=statistics.fmean(validations) if len(validations) == len(chosen) else None,
        scores={name: spread([_final(run)[name] for run in chosen]) for name in SCORES},
        best=spread([run.best for run in chosen if run.best is not None]),
        reached=tuple(zip(*(run.reached for run in chosen), strict=True)),
        up_bytes=statistics.fmean(run.up_bytes for run in chosen),
        down_bytes=statistics.fmean(run.down_bytes for run in chosen),
        seconds=statistics.fmean(run.seconds for run in chosen),
        edges=tuple(key for key, value in setting if _at_an_end(value, method.grid[key])),
    )


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    if not values:
        return Spread(math.nan, math.nan, 0)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


def pair(first: Row, other: Row) -> Paired | None:
    """Compare the mean accuracies of two methods' chosen settings seed by seed; None where they share none."""
    if not first.chosen or not other.chosen:
        return None
    of_first = {run.seed: _final(run)["mean"] for run in first.chosen}
    differences = [_final(run)["mean"] - of_first[run.seed] for run in other.chosen if run.seed in of_first]
    if not differences:
        return None
    found = spread(differences)
    half = math.nan
    if found.n > 1:
        half = float(stdtrit(found.n - 1, (1 + CONFIDENCE) / 2)) * found.std / math.sqrt(found.n)
    return Paired(
        found,
        found.mean - half,
        found.mean + half,
        sum(difference > 0 for difference in differences),
        sum(difference < 0 for difference in differences),
    )


def _choose(by_setting: Mapping[Setting, tuple[Outcome, ...]]) -> tuple[Setting | None, str]:
    complete = {
        setting: runs
        for setting, runs in by_setting.items()
        if all(run.status == "completed" and run.final is not None for run in runs)
    }
    if not by_setting:
        return None, "no seed is finished"
    if not complete:
        return None, "every setting has a failed run"
    if len(by_setting) == 1:
        return next(iter(complete)), ""
    scores = {
        setting: statistics.fmean(-math.inf if run.validation is None else run.validation for run in runs)
        for setting, runs in complete.items()
    }
    best = max(scores, key=scores.__getitem__)  # the first of equals
    return (None, "no run has a validation score") if scores[best] == -math.inf else (best, "")


def _final(run: Outcome) -> Mapping[str, float]:
    assert run.final is not None  # a run without one is never chosen
    return run.final


def _at_an_end(value: object, values: Sequence[object]) -> bool:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(numbers) == len(values) > 1 and value in (min(numbers), max(numbers))
