"""The results folder of a run: written as the run goes, read back afterwards.

* ``config.json``: everything that decides the run, with versions; written before round 1.
* ``history.jsonl``: one JSON object per round, on disk before the next round begins. With ``evaluate-in-train`` a
  round's scores are added when the next round has them, and marked ``evaluated_in_train``.
* ``clients.json``: what every client scored in the last evaluation.
* ``model.safetensors``: the final model.
* ``summary.json``: how the run ended; written at its end, also when it failed.

JSON has no NaN and no infinity: such numbers are null here.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from fedstrat.errors import ConfigError, StateError
from fedstrat.metrics.fairness import Fairness
from fedstrat.metrics.rounds import RoundReport
from fedstrat.runs.resume import check_unchanged
from fedstrat.runs.summary import SCORES, summarise

if TYPE_CHECKING:
    import torch

_PACKAGES = ("fedstrat", "flwr", "torch", "torchvision", "numpy", "scikit-learn", "safetensors")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A results folder, read back.

    Attributes:
        path: The folder.
        config: Contents of ``config.json``; the run config is under ``run_config``.
        history: The lines of ``history.jsonl``, in order.
        clients: Contents of ``clients.json``; None when nothing was evaluated.
        summary: Contents of ``summary.json``; None while the run goes on, or when it was killed.
    """

    path: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    clients: dict[str, Any] | None
    summary: dict[str, Any] | None


class RunFolder:
    """Writes the results folder of one run.

    Args:
        path: The folder; made if it doesn't exist.
        run_config: The flat run config.
        resume: Go on with the run that the folder holds, instead of refusing it.
        **facts: Whatever else decides or describes the run, such as ``experiment_id``, ``num_clients``,
            ``num_parameters`` and ``device``.

    Raises:
        ConfigError: The folder can't be written, holds a run already, or holds none to resume.
        StateError: The run to resume had other settings.
    """

    def __init__(self, path: str | Path, run_config: Mapping[str, Any], *, resume: bool = False, **facts: Any) -> None:
        self.path = Path(path)
        self.history: list[dict[str, Any]] = []
        self._target = float(run_config.get("target-accuracy", 0.0))
        entry = {"run_config": dict(run_config), **facts, "started": _now(), **_surroundings()}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if resume:
                self._reopen(entry)
            else:
                # Mode "x": of two runs that are given one folder, one is refused.
                with (self.path / "config.json").open("x", encoding="utf-8") as file:
                    file.write(_json(entry, indent=2))
        except FileExistsError:
            what = "holds a run already" if self.path.is_dir() else "is a file"
            raise ConfigError(
                f"the results folder {self.path} {what}; name another one in 'results-dir',"
                " or go on with that run by naming it in 'resume'"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the results folder {self.path} can't be written: {error.strerror}; name another one in 'results-dir'"
            ) from None

    def _reopen(self, entry: dict[str, Any]) -> None:
        recorded = load(self.path)
        self.history = recorded.history
        before, now = recorded.config["run_config"], entry["run_config"]
        check_unchanged(before, now)
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        entry["changed"] = {name: [before.get(name), now.get(name)] for name in names}
        resumed = [*recorded.config.get("resumed", []), entry]
        _replace(self.path / "config.json", _json({**recorded.config, "resumed": resumed}, indent=2))
        self._rewrite_history()
        (self.path / "summary.json").unlink(missing_ok=True)  # it spoke of the earlier end

    @classmethod
    def reopened(cls, recorded: Recorded) -> Self:
        """The folder of a run that ended without ``finish``; nothing is written yet."""
        folder = cls.__new__(cls)
        folder.path, folder.history = recorded.path, recorded.history
        folder._target = float(recorded.config["run_config"].get("target-accuracy", 0.0))  # noqa: SLF001 - its own
        return folder

    def record(self, report: RoundReport) -> None:
        """Append a finished round; a round that is there already, and all after it, give way."""
        if any(line["round"] >= report.round for line in self.history):
            self.history = [line for line in self.history if line["round"] < report.round]
            self._rewrite_history()
        if report.received is not None and self.history and self.history[-1]["mean"] is None:
            # What this round's clients say about the model that they received is about the round before.
            scores = {**_scores(report.received), "evaluated_in_train": True}
            self.history[-1] |= json.loads(_json(scores))
            self._rewrite_history()
        line = json.loads(_json(_history_line(report, self.history)))
        with (self.path / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.history.append(line)
        if report.counts is not None:
            clients = {name: _score(*counts) for name, counts in report.counts.items()}
            _replace(self.path / "clients.json", _json({"round": report.round, "clients": clients}))

    def keep_until(self, server_round: int) -> None:
        """Drop rounds after ``server_round``: the run goes on from there."""
        self.history = [line for line in self.history if line["round"] <= server_round]
        if self.history and self.history[-1].get("evaluated_in_train"):
            # The next round told them, and will again.
            self.history[-1] |= {**_scores(None), "evaluated_in_train": False}
        self._rewrite_history()

    def save_model(self, arrays: Mapping[str, "torch.Tensor"]) -> str:
        """Write ``model.safetensors`` atomically.

        Args:
            arrays: Name -> tensor, of any dtype and on any device; tensors may share memory.

        Returns:
            The SHA-256 of the file, in hexadecimal.
        """
        from safetensors.torch import save_file  # noqa: PLC0415  (imports torch)

        tensors: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, tensor in arrays.items():
            array = tensor.detach().cpu().contiguous()
            storage = array.untyped_storage().data_ptr()
            # The format refuses tensors that share memory, as tied weights do.
            tensors[name] = array.clone() if storage in storages else array
            storages.add(storage)
        path = self.path / "model.safetensors"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(tensors, temporary)
        _commit(temporary, path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def finish(
        self,
        status: Literal["completed", "failed", "interrupted"],
        *,
        error: str = "",
        model_sha256: str | None = None,
        validation: Mapping[str, Fairness | None] | None = None,
    ) -> dict[str, Any]:
        """Write ``summary.json`` and return its contents.

        Args:
            status: How the run ended.
            error: Why, if it failed.
            model_sha256: What ``save_model`` returned.
            validation: The final model on data held back from training (``validation``), and the personal models
                (``validation_personal``), where ``dataset.validation-fraction`` asks for it.
        """
        summary = {
            "status": status,
            "error": error or None,
            "finished": _now(),
            **summarise(self.history, self._target),
            **{
                name: None if scores is None else dataclasses.asdict(scores)
                for name, scores in (validation or {}).items()
            },
            "model_sha256": model_sha256,
        }
        _replace(self.path / "summary.json", _json(summary, indent=2))
        return summary

    def _rewrite_history(self) -> None:
        _replace(self.path / "history.jsonl", "".join(_json(line) + "\n" for line in self.history))


def load(path: str | Path) -> Recorded:
    """Read a results folder back; of a run that was killed, the last line may be torn and is left out.

    Raises:
        ConfigError: The folder holds no run.
        StateError: One of its files is damaged.
    """
    folder = Path(path)
    config = _read(folder / "config.json")
    if config is None:
        raise ConfigError(
            f"expected a results folder, but {folder} has no config.json; name the folder that a run printed last"
        )
    lines: list[dict[str, Any]] = []
    file = folder / "history.jsonl"
    texts = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts):
                raise StateError(f"{file}: line {number} is damaged; restore the file, or remove the line") from None
    return Recorded(folder, config, lines, _read(folder / "clients.json"), _read(folder / "summary.json"))


def _history_line(report: RoundReport, before: list[dict[str, Any]]) -> dict[str, Any]:
    traffic = dataclasses.asdict(report.traffic)
    last: dict[str, Any] = before[-1] if before else {"total_bytes": {}, "total_seconds": 0.0}
    return {
        "round": report.round,
        "num_rounds": report.num_rounds,
        "aggregated": report.aggregated,
        **_scores(report.fairness),
        "evaluated_in_train": False,
        "personal": None if report.personal is None else dataclasses.asdict(report.personal),
        "personal_elsewhere": None if report.elsewhere is None else dataclasses.asdict(report.elsewhere),
        "train": dict(report.train),
        "diagnostics": dict(report.diagnostics),
        "layers": report.layers,
        "server": dict(report.server),
        "bytes": traffic,
        "total_bytes": {name: last["total_bytes"].get(name, 0) + count for name, count in traffic.items()},
        "seconds": report.seconds,
        "total_seconds": last["total_seconds"] + report.seconds,
        "trained": list(report.trained),
        "failed": dict(report.failed),
    }


def _scores(fairness: Fairness | None) -> dict[str, Any]:
    scores = dataclasses.asdict(fairness) if fairness else {}
    return {
        **{name: scores.get(name) for name in SCORES},
        "worst": scores.get("worst"),
        "num_evaluated": scores.get("num_clients"),
    }


def _score(num_correct: int, loss_sum: float, num_examples: int) -> dict[str, Any]:
    some = num_examples > 0
    return {
        "accuracy": num_correct / num_examples if some else None,
        "loss": loss_sum / num_examples if some else None,
        "num_correct": num_correct,
        "num_examples": num_examples,
    }


def _surroundings() -> dict[str, Any]:
    """What the run stands on: versions and platform."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            # What runs may be another copy than what is installed: an app bundle's, or a build of its own.
            loaded = getattr(sys.modules.get(package), "__version__", None)
            versions[package] = str(loaded or importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"versions": {"python": sys.version.split()[0], **versions}, "platform": platform.platform()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    """``value`` in JSON's types: numbers of other libraries as Python's, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise StateError(f"{path} is damaged: it holds no JSON; restore it, or remove the folder") from None
    return contents


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers, and a crash, see the old contents or the new ones."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    _commit(temporary, path)


def _commit(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
