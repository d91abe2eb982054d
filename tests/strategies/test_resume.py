"""A run that was killed in mid-round and goes on is bit for bit the run that wasn't, for every algorithm.

The server is killed in round 4, when its clients have trained and its history has been written, but before its
checkpoint; a new strategy, new nodes in other places, and the client state on disk go on after round 3.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import Result

from fedstrat.errors import StateError
from fedstrat.runs.checkpoint import CheckpointFolder
from fedstrat.runs.history import RunFolder, load
from fedstrat.strategies import ALGORITHMS
from tests.strategies import small
from tests.strategies.small import TRAINED, Recorder, bits, frozen, start

ROUNDS, CHECKPOINTED = 6, 3
CONFIG = {"algorithm": "any", "num-server-rounds": ROUNDS}
SETTINGS: dict[str, dict[str, Any]] = {"fedcspack": {"pack_size": 4}}


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


@dataclass
class Server:
    """A server's life: what it remembers at its end, whom it asked, and what it was told."""

    strategy: Any
    grid: Recorder
    result: Result | None


def live(
    algorithm: str, folder: Path, state: Path, *, resume: bool = False, dies_in: int = 0, order: tuple[int, ...] = ()
) -> Server:
    """Run until the end, or until death in a round."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    snapshot = checkpoints.latest() if resume else None
    history = RunFolder(folder, CONFIG, resume=resume)
    if snapshot is not None:
        history.keep_until(snapshot.round)
    strategy = ALGORITHMS[algorithm].strategy(
        **{"seed": 7, "fraction_train": 0.6, "trainable": TRAINED, **SETTINGS.get(algorithm, {})}
    )
    places = [{"partition-id": i, "num-partitions": len(small.SIZES)} for i in order or range(len(small.SIZES))]
    grid = Recorder(small.client_app(small.everything), node_configs=places, run_config={"state-dir": str(state)})

    def on_round(report: Any) -> None:
        history.record(report)
        if report.round == dies_in:
            raise Killed

    try:
        run = start(
            strategy, grid, small.everything, ROUNDS, on_round=on_round, checkpoints=checkpoints, resume=snapshot
        )
    except Killed:
        return Server(strategy, grid, None)
    return Server(strategy, grid, run.result)


def remembered(strategy: Any) -> Any:
    return frozen([strategy.state, strategy.buffers, strategy.accepted, sorted(strategy.seen), sorted(strategy.moving)])


def files(state: Path) -> dict[str, bytes]:
    """The clients' state files, without the folder that is named after the experiment."""
    return {"/".join(p.relative_to(state).parts[1:]): p.read_bytes() for p in state.rglob("*") if p.is_file()}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in load(folder).history]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_six_rounds_are_three_rounds_a_kill_and_three_rounds(algorithm: str, tmp_path: Path) -> None:
    straight = live(algorithm, tmp_path / "straight", tmp_path / "state-1")
    folder, state = tmp_path / "killed", tmp_path / "state-2"
    killed = live(algorithm, folder, state, dies_in=CHECKPOINTED + 1)
    assert len(rows(folder)) == CHECKPOINTED + 1
    resumed = live(algorithm, folder, state, resume=True, order=(3, 0, 4, 1, 2))

    assert bits(resumed.result.arrays) == bits(straight.result.arrays)
    assert remembered(resumed.strategy) == remembered(straight.strategy)
    assert resumed.strategy.experiment_id == killed.strategy.experiment_id
    assert files(state) == files(tmp_path / "state-1")
    cohorts = [straight.grid.cohort(t) for t in range(1, ROUNDS + 1)]
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert [killed.grid.cohort(t) for t in range(1, CHECKPOINTED + 2)] == cohorts[: CHECKPOINTED + 1]
    assert [resumed.grid.cohort(t) for t in range(1, ROUNDS + 1)] == [[]] * CHECKPOINTED + cohorts[CHECKPOINTED:]
    assert [row["round"] for row in rows(folder)] == [*range(1, ROUNDS + 1)]
    assert rows(folder) == rows(tmp_path / "straight")
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        assert getattr(resumed.result, name) == getattr(straight.result, name)


def test_clients_with_state_have_files_and_others_have_none(tmp_path: Path) -> None:
    """So that the comparison above compares something."""
    for algorithm, entry in ALGORITHMS.items():
        state = tmp_path / algorithm
        live(algorithm, tmp_path / f"run-{algorithm}", state, dies_in=1)
        assert bool(files(state) if state.exists() else {}) == (
            entry.strategy.stateful_clients or live_strategy(algorithm).evaluate_personal
        )


def live_strategy(algorithm: str) -> Any:
    return ALGORITHMS[algorithm].strategy(**SETTINGS.get(algorithm, {}))


@pytest.mark.parametrize("algorithm", ["scaffold", "fedcspack"])
def test_a_truncated_checkpoint_gives_way_to_the_one_before(
    algorithm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Round 3's checkpoint is cut short: the run goes on after round 2; clients of round 3 start afresh."""
    folder, state = tmp_path / "run", tmp_path / "state"
    live(algorithm, folder, state, dies_in=CHECKPOINTED + 1)
    newest = folder / "checkpoints" / f"round-{CHECKPOINTED:06d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    resumed = live(algorithm, folder, state, resume=True)
    assert resumed.grid.trips[0].round == CHECKPOINTED
    (said,) = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert str(newest) in said
    assert "damaged" in said
    assert "trying the one before" in said
    assert [row["round"] for row in rows(folder)] == [*range(1, ROUNDS + 1)]


def test_a_run_of_another_algorithm_or_setting_is_refused(tmp_path: Path) -> None:
    live("scaffold", tmp_path / "run", tmp_path / "state", dies_in=CHECKPOINTED + 1)
    snapshot = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()

    def resume(strategy: Any) -> None:
        start(strategy, Recorder(small.client_app(small.everything)), small.everything, resume=snapshot)

    with pytest.raises(StateError, match="the checkpoint is of 'scaffold', but this strategy is 'fedavg'"):
        resume(ALGORITHMS["fedavg"].strategy(seed=7, trainable=TRAINED))
    with pytest.raises(StateError, match=r"fraction_train = 0\.6, but this strategy has 1\.0"):
        resume(ALGORITHMS["scaffold"].strategy(seed=7, trainable=TRAINED))
    with pytest.raises(StateError, match=r"option = 2, but this strategy has 1"):
        resume(ALGORITHMS["scaffold"].strategy(seed=7, trainable=TRAINED, fraction_train=0.6, option=1))


def test_checkpoints_are_as_seldom_as_asked_for_unless_clients_wait_for_them(tmp_path: Path) -> None:
    def saved(algorithm: str, rounds: int = 7, **settings: Any) -> list[int]:
        seen: list[int] = []

        class Folder(CheckpointFolder):
            def save(self, snapshot: Any) -> None:
                seen.append(snapshot.round)
                super().save(snapshot)

        strategy = ALGORITHMS[algorithm].strategy(seed=7, fraction_evaluate=0.0, **settings)
        grid = Recorder(small.client_app(small.convex))
        start(strategy, grid, small.convex, rounds, checkpoints=Folder(tmp_path / algorithm, every=3))
        return seen

    assert saved("fedavg") == [3, 6, 7]
    assert saved("scaffold", 3) == [1, 2, 3]
    assert saved("fedprox", 3, evaluate_personal=True) == [1, 2, 3]


@pytest.mark.parametrize("algorithm", ["scaffold", "fedavg"])
def test_a_checkpoint_is_on_disk_before_its_round_is_acknowledged(algorithm: str, tmp_path: Path) -> None:
    """A client may forget what it needs to go back only when the server can't go back any more."""
    checkpoints = CheckpointFolder(tmp_path)
    grid = Recorder(small.client_app(small.convex))
    acknowledged: list[tuple[int, int]] = []
    push = grid.push_messages

    def watch(messages: Any) -> Any:
        messages = list(messages)
        config = messages[0].content.config_records.get("config", {})
        if config.get("fedstrat.accepted-round"):
            acknowledged.append((config["fedstrat.accepted-round"], checkpoints.latest().round))
        return push(messages)

    grid.push_messages = watch
    strategy = ALGORITHMS[algorithm].strategy(seed=7, fraction_evaluate=0.0)
    start(strategy, grid, small.convex, 4, checkpoints=checkpoints)
    assert acknowledged == [(1, 1), (2, 2), (3, 3)]


def test_two_runs_at_once_in_one_state_folder_do_not_meet(tmp_path: Path) -> None:
    """Round by round in turns, over the same clients and state folder: each as if it were alone."""
    alone = live("scaffold", tmp_path / "alone", tmp_path / "state-alone")
    state, others = tmp_path / "state", []

    def other(report: Any) -> None:
        if not others:
            others.append(live("scaffold", tmp_path / "other", state))

    strategy = ALGORITHMS["scaffold"].strategy(seed=7, fraction_train=0.6, trainable=TRAINED)
    grid = Recorder(small.client_app(small.everything), run_config={"state-dir": str(state)})
    one = start(strategy, grid, small.everything, ROUNDS, on_round=other)  # the other runs within its first round
    assert bits(one.result.arrays) == bits(others[0].result.arrays) == bits(alone.result.arrays)
    assert others[0].strategy.experiment_id != strategy.experiment_id
    experiments = sorted(folder.name for folder in state.iterdir())
    assert experiments == sorted([strategy.experiment_id, others[0].strategy.experiment_id])
    trees = [
        {str(p.relative_to(state / e)): p.read_bytes() for p in (state / e).rglob("*.safetensors")} for e in experiments
    ]
    assert trees[0] == trees[1]
    assert len(trees[0]) == 2 * len(small.SIZES)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_evaluating_changes_nothing(algorithm: str) -> None:
    def run(share: float, every: int) -> list[Any]:
        settings = {"seed": 7, "trainable": TRAINED, "fraction_evaluate": share, **SETTINGS.get(algorithm, {})}
        strategy = ALGORITHMS[algorithm].strategy(**settings)
        grid = Recorder(small.client_app(small.everything), 3)
        models = start(strategy, grid, small.everything, 3, evaluate_every=every).models
        return [remembered(strategy), *(bits(model) for model in models)]

    assert run(1.0, 1) == run(0.0, 1) == run(0.5, 2)


def test_history_of_a_resumed_run_is_valid_json_lines(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    live("fedvssam", folder, tmp_path / "state", dies_in=CHECKPOINTED + 1)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 5, "torn')
    live("fedvssam", folder, tmp_path / "state", resume=True)
    lines = (folder / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [*range(1, ROUNDS + 1)]
