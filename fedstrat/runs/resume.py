"""Going on with a run: which settings it had, which may change, and how a run that was cut short is closed."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedstrat.errors import ConfigError, FedstratError, StateError
from fedstrat.runs.keys import ELSEWHERE, algorithms

logger = logging.getLogger("flwr")

Scalar = bool | int | float | str

FREE = ELSEWHERE | {
    "num-server-rounds", "evaluate-every", "evaluate-in-train", "fraction-evaluate", "min-replies", "max-failed-rounds",
    "target-accuracy", "patience",
}  # fmt: skip
"""Keys of the run config that may change at a resume: they don't decide what is computed, but for the last bits."""

_PLACES = ("results-dir", "resume")


_MOST_NAMED = 5


def check_resumable(folder: Path) -> None:
    """Refuse a folder that holds no run.

    Raises:
        ConfigError: Names the runs that lie near it, the newest first.
    """
    if (folder / "config.json").is_file():
        return
    what = "has no config.json" if folder.is_dir() else "doesn't exist" if not folder.exists() else "is a file"
    near = [path.parent for place in (folder, folder.parent) for path in place.glob("*/config.json")]
    near.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    names = ", ".join(str(path) for path in near[:_MOST_NAMED])
    rest = f" and {len(near) - _MOST_NAMED} more" if len(near) > _MOST_NAMED else ""
    runs = f"the runs near it are {names}{rest}" if near else f"there is no run in {folder.parent} either"
    raise ConfigError(
        f"resume={folder}: expected the results folder of a run, which a run prints last, but it {what}; {runs}"
    )


def recorded_settings(folder: Path) -> dict[str, Scalar]:
    """The run config of the run that ``folder`` holds, as it last went on, without the places that it wrote to.

    A resumed run takes these where the user gives no others, so that naming the folder is enough. Empty where there is
    no run.
    """
    from fedstrat.runs.history import load  # noqa: PLC0415  (tests of the launcher need no folder)

    try:
        recorded = load(folder).config
        before: dict[str, Scalar] = [recorded, *recorded.get("resumed", [])][-1]["run_config"]
    except (FedstratError, OSError, KeyError, TypeError):
        return {}  # the ServerApp says what is wrong
    written = Path(str(before.get("results-dir", ""))) / "state"
    # State within the folder goes with it, wherever it was moved.
    away = (*_PLACES, "state-dir") if before.get("state-dir") == str(written) else _PLACES
    return {name: value for name, value in before.items() if name not in away}


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with settings that compute something else.

    Args:
        before: The run config of the run so far.
        now: The run config of the run that goes on with it.

    Raises:
        StateError: Names the first key that differs.
    """
    # A schedule that ends with the run is another one when the run gets longer.
    free = FREE - {"num-server-rounds"} if before.get("train.lr-schedule") == "cosine" else FREE
    used = {now.get("algorithm"), now.get(f"{now.get('algorithm')}.aggregator")}
    unused = tuple(f"{name}." for name in algorithms() if name not in used)
    for name in now:
        if name in free or name.startswith(unused) or name not in before or before[name] == now[name]:
            continue
        raise StateError(
            f"the run that 'resume' names had {name} = {before[name]!r}, but this one has {now[name]!r}; resume with"
            " the same settings, or begin a new run"
        )


def close_folder(folder: Path, status: Literal["failed", "interrupted"], error: str) -> None:
    """Write the summary and the last good model of a run whose ServerApp was ended before it could.

    Nothing happens where the folder holds no run, or one that did write its summary.
    """
    from fedstrat.payloads import decode  # noqa: PLC0415  (imports torch)
    from fedstrat.runs import config  # noqa: PLC0415
    from fedstrat.runs.checkpoint import CheckpointFolder  # noqa: PLC0415
    from fedstrat.runs.history import RunFolder, load  # noqa: PLC0415

    try:
        recorded = load(folder)
        if recorded.summary is not None:
            return
        run = RunFolder.reopened(recorded)
        sha256 = None
        try:
            snapshot = CheckpointFolder(folder / "checkpoints").latest()
            known = config.keys()
            flat = {key: value for key, value in recorded.config["run_config"].items() if key in known}
            flat["aggregation-device"] = "cpu"  # nothing is worked out, and the device may be what ended the run
            sha256 = run.save_model(decode(config.parse(flat).strategy().restore(snapshot), "model"))
        except FedstratError as problem:
            logger.debug("no model is saved: %s", problem)
        run.finish(status, error=error, model_sha256=sha256)
    except (FedstratError, OSError) as problem:
        logger.debug("%s can't be closed: %s", folder, problem)
