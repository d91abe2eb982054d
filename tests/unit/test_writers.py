"""TensorBoard and Weights & Biases get every round's numbers, and never cost a run."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fedstrat.metrics.fairness import fairness
from fedstrat.metrics.rounds import RoundReport, Traffic
from fedstrat.runs.config import RunConfig, parse
from fedstrat.runs.writers import Writers, scalars

COUNTS = {"0": (3, 4.0, 10), "1": (9, 2.0, 10)}


def report(number: int = 1) -> RoundReport:
    return RoundReport(
        round=number, num_rounds=3, seconds=1.5, aggregated=True, trained=("0",), counts=COUNTS,
        fairness=fairness(COUNTS), train={"train-loss": 0.5}, diagnostics={"conflict-rate": 0.25},
        layers={"fc": {"rank": 2.0}}, traffic=Traffic(train_up_payload=100, train_down_payload=200),
    )  # fmt: skip


def config(**keys: Any) -> RunConfig:
    return parse({name.replace("_", "-"): value for name, value in keys.items()})


class FakeWandb(types.ModuleType):
    """What of the package is used, writing down what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False
        self.fails: list[str] = []

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **given: Any) -> "FakeWandb":
        self._maybe_fail("init")
        self.started = given
        return self

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        self._maybe_fail("log")
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self._maybe_fail("finish")
        self.finished = True

    def _maybe_fail(self, what: str) -> None:
        if what in self.fails:
            raise ConnectionError(f"{what}: no route with key s3cr3t-key-of-mine\nmore")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-key-of-mine")
    return module


def test_every_kind_of_number_has_a_name() -> None:
    found = scalars(report())
    assert found["test/mean"] == pytest.approx(0.6)
    assert found["test/worst10"] == 0.3
    assert (found["train/train-loss"], found["diagnostics/conflict-rate"], found["layers/fc/rank"]) == (0.5, 0.25, 2.0)
    assert (found["bytes/train-up"], found["bytes/train-down"], found["clients/trained"]) == (100.0, 200.0, 1.0)
    assert not [name for name in found if name.startswith("personal/")]


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writers = Writers(config(tensorboard=True), tmp_path)
    for number in (1, 2):
        writers(report(number))
    writers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(scalars(report()))
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("test/mean")] == [(1, 0.6), (2, 0.6)]


def test_wandb_gets_config_and_rounds(wandb: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = config(wandb_project="ours", seed=5)
    writers = Writers(run, tmp_path / "20260102-craft")
    writers(report(1))
    writers(report(2))
    writers.close()
    assert wandb.started["project"] == "ours"
    assert wandb.started["name"] == "20260102-craft"
    assert wandb.started["config"] == dict(run.flat)
    assert wandb.logged == [(1, scalars(report(1))), (2, scalars(report(2)))]
    assert wandb.finished
    assert not caplog.text


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failure_of_wandb_is_one_warning_without_the_key(
    where: str, wandb: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.fails = [where]
    writers = Writers(config(wandb_project="ours"), tmp_path)
    for number in (1, 2, 3):
        writers(report(number))
    writers.close()
    assert len(caplog.records) == 1
    assert "the run goes on: ConnectionError" in caplog.text
    assert "s3cr3t" not in caplog.text


@pytest.mark.parametrize(
    ("keys", "module", "extra"),
    [
        ({"tensorboard": True}, "torch.utils.tensorboard", "fedstrat[tensorboard]"),
        ({"wandb_project": "ours"}, "wandb", "fedstrat[wandb]"),
    ],
)
def test_an_absent_package_is_one_warning(
    keys: dict[str, Any], module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    writers = Writers(config(**keys), tmp_path)
    writers(report(1))
    writers(report(2))
    writers.close()
    assert len(caplog.records) == 1
    assert extra in caplog.text


def test_without_asking_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    Writers(config(), tmp_path)(report())
    assert not list(tmp_path.iterdir())
