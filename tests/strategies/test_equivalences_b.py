"""What FedMGDA+, FedFV and FedLF reduce to, and what stays true in every round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrat import MOON, FedAvg, FedFV, FedLF, FedMGDAPlus
from fedstrat.payloads import NOTHING, Update
from fedstrat.runs.checkpoint import CheckpointFolder
from tests.strategies import small
from tests.strategies.small import Recorder, bits

COMMON = {"seed": 3, "fraction_evaluate": 0.0}
GENERATOR = np.random.default_rng(11)


class Steps:
    """A strategy's server half alone: one step from hand-made displacements, client "0" first.

    ``cuts`` are where the vector is cut into tensors.
    """

    def __init__(self, strategy: Any, x: Sequence[float], *cuts: int) -> None:
        self.strategy, self.x, self.cuts = strategy, np.asarray(x, float), cuts
        self.state = strategy.init_state(self.tensors(self.x))

    def tensors(self, v: np.ndarray) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(part) for name, part in zip("abc", np.split(v, self.cuts), strict=False)}

    def __call__(
        self,
        deltas: Any,
        losses: Sequence[float] | None = None,
        examples: Sequence[float] | None = None,
        clients: Sequence[int] | None = None,
    ) -> np.ndarray:
        """The model's displacement."""
        before = np.concatenate([t.numpy() for t in self.state.params.values()])
        deltas = np.asarray(deltas, float)
        m = len(deltas)
        updates = [
            Update(
                client=str(i if clients is None else clients[i]),
                num_examples=1.0 if examples is None else examples[i],
                num_steps=1,
                lr_sum=0.1,
                params=self.tensors(before + deltas[i]),
                metrics={"loss-before": float(i) if losses is None else losses[i]},
                extra=NOTHING,
            )
            for i in range(m)
        ]
        self.state = self.strategy.aggregate(self.state, updates)
        return np.concatenate([t.numpy() for t in self.state.params.values()]) - before


def one_step(strategy: Any, deltas: Any, *args: Any, cut: int | tuple[int, ...] = 1, **options: Any) -> np.ndarray:
    return Steps(strategy, np.zeros(np.shape(deltas)[1]), *np.atleast_1d(cut))(deltas, *args, **options)


def draw(*shape: int) -> np.ndarray:
    return GENERATOR.normal(size=shape)


def norm(v: np.ndarray) -> float:
    return float(np.linalg.norm(v))


def units(deltas: np.ndarray) -> np.ndarray:
    return deltas / np.linalg.norm(deltas, axis=1, keepdims=True)


@pytest.mark.parametrize(
    "strategy",
    [FedMGDAPlus(), FedMGDAPlus(epsilon=1.0), FedFV(), FedFV(alpha=0.5, tau=2), FedLF()],
    ids=["FedMGDA+", "free FedMGDA+", "FedFV", "old FedFV", "FedLF"],
)
def test_clients_are_interchangeable(strategy: Any) -> None:
    first, second, losses, examples = draw(6, 30), draw(6, 30), [0.3, 2.0, 1.1, 0.7, 1.9, 0.1], [1, 9, 4, 2, 3, 8]
    found = []
    for order in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]):
        # Two rounds, so that clients 0 to 3 are remembered in the second under their other names.
        steps = Steps(strategy, np.zeros(30), 12)
        earlier = [i for i in order if i < 4]
        steps(first[earlier], clients=[order.index(i) for i in earlier])
        later = [i for i in order if i > 2]
        found.append(
            steps(
                second[later],
                [losses[i] for i in later],
                [examples[i] for i in later],
                [order.index(i) for i in later],
            )
        )
    # Losses of round 1 are by place there, so only what is remembered counts: the same displacements.
    np.testing.assert_allclose(found[1], found[0], atol=1e-9)


# --- FedMGDA+ --------------------------------------------------------------------------------------------------------


def test_fedmgda_without_freedom_weighs_unit_updates_by_data() -> None:
    deltas, examples = draw(5, 40), np.array([3, 1, 7, 2, 11])
    step = one_step(FedMGDAPlus(epsilon=0.0, server_lr=0.7), deltas, None, examples)
    np.testing.assert_allclose(step, 0.7 * (examples / 24) @ units(deltas), atol=1e-12)


def test_every_client_gains_along_fedmgdas_free_step() -> None:
    for size in (40, 8, 3):
        deltas = draw(6, size) + 1.0
        step = one_step(FedMGDAPlus(epsilon=1.0), deltas, None, [1, 2, 3, 4, 5, 6])
        assert (units(deltas) @ step).min() >= norm(step) ** 2 - 1e-12
        assert norm(step) <= 1.0


def test_fedmgda_keeps_near_the_data_weights_on_both_sides() -> None:
    # Orthonormal updates: the free weights are equal. p = (0.5, 0.3, 0.2) may go no further than 0.05 towards 1/3.
    step = one_step(FedMGDAPlus(epsilon=0.05), np.eye(3), None, [50, 30, 20])
    np.testing.assert_allclose(step, [0.45, 0.30, 0.25], atol=1e-12)


def test_fedmgda_of_opposite_clients_stays() -> None:
    v = draw(20)
    np.testing.assert_allclose(one_step(FedMGDAPlus(epsilon=1.0), [v, -3.0 * v]), 0.0, atol=1e-12)


def test_fedmgdas_step_ignores_lengths_and_clients_that_stood_still() -> None:
    deltas = draw(4, 25)
    step = one_step(FedMGDAPlus(), deltas, None, [4, 3, 2, 1])
    still = np.vstack([deltas * np.array([[2.0], [0.1], [1.0], [30.0]]), np.zeros(25)])
    np.testing.assert_allclose(one_step(FedMGDAPlus(), still, None, [4, 3, 2, 1, 5]), step, atol=1e-12)
    assert not one_step(FedMGDAPlus(), np.zeros((3, 25))).any()


# --- FedFV -----------------------------------------------------------------------------------------------------------


def test_fedfv_without_conflicts_is_the_uniform_mean() -> None:
    deltas = np.abs(draw(5, 30))
    step = one_step(FedFV(tau=1), deltas, None, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(step, deltas.mean(axis=0), atol=1e-12)


def test_fedfv_that_keeps_everybody_is_the_uniform_mean() -> None:
    deltas = np.array([[1.0, 0.6, 0.0], [-1.0, 0.6, 0.0], [0.2, 1.0, 1.0]])
    mean = deltas.mean(axis=0)
    assert deltas[0] @ deltas[1] < 0 < (deltas @ mean).min()
    np.testing.assert_allclose(one_step(FedFV(alpha=1.0), deltas), mean, atol=1e-12)
    assert norm(one_step(FedFV(alpha=0.1), deltas) - mean) > 0.05


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.0}, {"alpha": 0.6, "tau": 3}], ids=str)
def test_fedfvs_step_is_as_long_as_the_mean(settings: dict[str, Any]) -> None:
    steps = Steps(FedFV(**settings), np.zeros(12), 5)
    for _ in range(5):
        deltas = draw(4, 12)
        step = steps(deltas, draw(4).tolist(), clients=GENERATOR.permutation(9)[:4])
        assert norm(step) == pytest.approx(norm(deltas.mean(axis=0)), rel=1e-9)


@pytest.mark.parametrize("larger", [0, 1])
def test_fedfv_keeps_the_client_of_largest_loss(larger: int) -> None:
    deltas = np.array([[1.0, 0.0], [-0.5, 2.0]])
    kept, other = deltas[larger], deltas[1 - larger]
    # The other loses what conflicts with the kept one; then neither conflicts with the sum.
    g = kept + other - (other @ kept) / (kept @ kept) * kept
    expected = norm(deltas.mean(axis=0)) * g / norm(g)
    losses = [2.0, 1.0] if larger == 0 else [1.0, 2.0]
    np.testing.assert_allclose(one_step(FedFV(), deltas, losses), expected, atol=1e-12)


def test_fedfv_removes_conflicts_with_absent_clients() -> None:
    old, new = np.array([-1.0, 1.0, 0.0]), np.array([2.0, 0.0, 1.0])
    for tau in (1, 2, 3):
        steps = Steps(FedFV(tau=tau), np.zeros(3), 1)
        steps([old], clients=[7])
        if tau == 3:  # client 7 is two rounds old in round 3, which is the first to look back
            steps([[0.0, 0.0, 1.0]], clients=[8])
        g = new - (new @ old) / (old @ old) * old if tau > 1 else new
        np.testing.assert_allclose(steps([new], clients=[1]), norm(new) * g / norm(g), atol=1e-12)


def test_fedfv_forgets_what_is_too_old_and_does_not_look_back_at_first() -> None:
    old, new = np.array([-1.0, 1.0]), np.array([2.0, 0.0])
    steps = Steps(FedFV(tau=3), np.zeros(2), 1)
    steps([old], clients=[7])
    np.testing.assert_allclose(steps([new], clients=[1]), new, atol=1e-12)  # round 2 < tau
    steps([[1.0, 0.0]], clients=[2])
    assert {key.partition("/")[0] for key in steps.state.history} == {"1", "2"}, "7 will be 3 rounds old"
    np.testing.assert_allclose(steps([new], clients=[1]), new, atol=1e-12)
    assert {key.partition("/")[0] for key in steps.state.history} == {"1", "2"}


def test_fedfv_of_updates_that_cancel_stays() -> None:
    v = draw(10)
    assert not one_step(FedFV(), [v, -v]).any()
    assert not one_step(FedFV(), np.zeros((3, 10))).any()


# --- FedLF -----------------------------------------------------------------------------------------------------------


def free_step(deltas: np.ndarray) -> np.ndarray:
    """The shortest combination of rows of mean length."""
    mean = float(np.linalg.norm(deltas, axis=1).mean())
    return mean * one_step(FedMGDAPlus(epsilon=1.0), deltas)


def test_no_client_loses_in_any_layer_nor_does_fairness() -> None:
    steps = Steps(FedLF(), np.zeros(60), 25)
    remembered: dict[int, np.ndarray] = {}
    for _ in range(4):
        deltas, F = draw(4, 60) + 0.3, np.abs(draw(4)) + 0.1
        clients = GENERATOR.permutation(8)[:4]
        step = steps(deltas, F.tolist(), clients=clients)
        # P = -cos(F, 1) changes by the sum of dP/dF_i <g_i, d>; the slopes by finite differences.
        even, h = np.full(4, 0.5), 1e-6
        slopes = [(-(even @ (F + h * e)) / norm(F + h * e) + (even @ (F - h * e)) / norm(F - h * e)) / (2 * h)
                  for e in np.eye(4)]  # fmt: skip
        absent = [v for client, v in remembered.items() if client not in clients]
        for part in (slice(0, 25), slice(25, 60)):
            assert (deltas[:, part] @ step[part]).min() >= -1e-12
            assert (slopes @ deltas[:, part]) @ step[part] >= -1e-9
            assert all(v[part] @ step[part] >= -1e-12 for v in absent)
        assert norm(step) == pytest.approx(norm(deltas.mean(axis=0)), rel=1e-9)
        remembered = dict(zip(clients.tolist(), deltas, strict=True))  # all of the last round are young enough
    assert absent


def test_fedlf_of_one_client_is_fedavg() -> None:
    (delta,) = draw(1, 12)
    np.testing.assert_allclose(one_step(FedLF(), [delta], [3.0], cut=5), delta, atol=1e-14)
    run = small.run(FedLF(**COMMON, min_train_nodes=1, min_available_nodes=1), small.double, 1, num_nodes=1,
                    loader=lambda c: small.batches(c, 8, torch.float64))  # fmt: skip
    fedavg = small.run(FedAvg(**COMMON, min_train_nodes=1, min_available_nodes=1), small.double, 1, num_nodes=1,
                       loader=lambda c: small.batches(c, 8, torch.float64))  # fmt: skip
    np.testing.assert_allclose(small.vector(run.models[1]), small.vector(fedavg.models[1]), atol=1e-14)


@pytest.mark.parametrize("losses", [[1.7] * 4, [0.0] * 4])
def test_equal_losses_leave_mgda_in_every_layer(losses: list[float]) -> None:
    deltas = draw(4, 50) + 0.3
    d = np.concatenate([free_step(deltas[:, :20]), free_step(deltas[:, 20:])])
    expected = d / norm(d) * norm(deltas.mean(axis=0))
    np.testing.assert_allclose(one_step(FedLF(), deltas, losses, cut=20), expected, atol=1e-9)
    assert norm(one_step(FedLF(), deltas, [1.0, 2.0, 3.0, 4.0], cut=20) - expected) > 1e-3


def test_a_layer_without_a_common_direction_is_joined_with_its_neighbour() -> None:
    v, w = draw(4), draw(2, 4) + 2.0
    for deltas in (np.hstack([[v, -v], w]), np.hstack([w, [v, -v]])):
        d = free_step(deltas)  # both layers as one
        expected = d / norm(d) * norm(deltas.mean(axis=0))
        np.testing.assert_allclose(one_step(FedLF(), deltas, [1.0, 1.0], cut=4), expected, atol=1e-9)
    # The middle one of three: with the next.
    first, last = draw(2, 4) + 1.0, draw(2, 4) + 2.0
    deltas = np.hstack([first, [v, -v], last])
    d = np.concatenate([free_step(first), free_step(np.hstack([[v, -v], last]))])
    expected = d / norm(d) * norm(deltas.mean(axis=0))
    np.testing.assert_allclose(one_step(FedLF(), deltas, [1.0, 1.0], cut=(4, 8)), expected, atol=1e-9)


def test_layers_and_clients_that_stood_still_are_left_out() -> None:
    deltas = draw(3, 20) + 0.3
    deltas[:, :8] = 0.0
    deltas[1] = 0.0
    moving = deltas[[0, 2], 8:]
    d = free_step(moving)
    expected = np.concatenate([np.zeros(8), d / norm(d) * norm(deltas.mean(axis=0))])
    np.testing.assert_allclose(one_step(FedLF(), deltas, [2.0] * 3, cut=8), expected, atol=1e-9)
    assert np.isfinite(one_step(FedLF(), deltas, [2.0, 1.0, 5.0], cut=8)).all()
    assert not one_step(FedLF(), np.zeros((3, 20)), [2.0, 1.0, 5.0], cut=8).any()
    v = draw(20)
    assert not one_step(FedLF(), [v, -v], [1.0, 1.0], cut=8).any(), "everything is joined, and nothing is left"


# --- what is remembered survives -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "settings"), [(FedFV, {"tau": 3}), (FedLF, {}), (MOON, {"mu": 5.0})], ids=["FedFV", "FedLF", "MOON"]
)
def test_a_resumed_run_is_the_same_run(algorithm: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    def strategy() -> Any:
        return algorithm(**COMMON, **settings, fraction_train=0.4, trainable=small.TRAINED)

    straight = small.run(strategy(), small.everything, 5)
    folder, grid = CheckpointFolder(tmp_path), Recorder(small.client_app(small.everything))
    small.start(strategy(), grid, small.everything, 3, checkpoints=folder)
    resumed = small.start(strategy(), grid, small.everything, 5, resume=folder.latest())
    assert bits(resumed.result.arrays) == bits(straight.result.arrays)
