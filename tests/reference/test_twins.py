"""The twins checked against themselves: finite differences, published identities and limiting cases."""

from dataclasses import replace

import numpy as np
import pytest

from tests.reference.config import ConFIG
from tests.reference.craft import CRAFT, constrained
from tests.reference.fedavg import FedAvg
from tests.reference.fedavgm import FedAvgM
from tests.reference.fedprox import FedProx
from tests.reference.fedsam import FedSAM
from tests.reference.fedvssam import FedVSSAM
from tests.reference.mofedsam import MoFedSAM
from tests.reference.problem import SIZES, Array, make_task
from tests.reference.rounds import Twin
from tests.reference.scaffold import SCAFFOLD

COHORTS = [[0, 3, 5], [1, 2, 3, 7], [4, 6], [0, 5, 6], [2, 3, 7], [1, 4]]
CLIPPED = make_task(clip_norm=1.1)


def after(twin: Twin, cohorts: list[list[int]] = COHORTS) -> Array:
    for cohort in cohorts:
        twin.round(cohort)
    return twin.x


def check_same(one: Array, other: Array) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_gradient_is_the_slope_of_the_loss():
    task = make_task()
    rows, labels = task.rows[3], task.labels[3]
    f = rows @ task.embed.T

    def loss(y: Array) -> float:
        return task.loss_and_gradient(y, rows, labels, f.mean(axis=0), f.var(axis=0))[0]

    g, _ = task.gradient(task.x0, rows, labels, task.buffers0)
    h = 1e-6
    slopes = [(loss(task.x0 + h * e) - loss(task.x0 - h * e)) / (2 * h) for e in np.eye(len(task.x0))]
    np.testing.assert_allclose(g, slopes, atol=1e-8)


def test_full_gradient_normalises_by_the_running_statistics():
    task = make_task(weight_decay=0.3)
    buffers = replace(task.buffers0, mean=task.buffers0.mean + 0.2, var=task.buffers0.var * 1.7)

    def objective(y: Array) -> float:
        loss, _ = task.loss_and_gradient(y, task.rows[2], task.labels[2], buffers.mean, buffers.var)
        return loss + 0.15 * float(y @ y)

    h = 1e-6
    slopes = [(objective(task.x0 + h * e) - objective(task.x0 - h * e)) / (2 * h) for e in np.eye(len(task.x0))]
    np.testing.assert_allclose(task.full_gradient(2, task.x0, buffers), slopes, atol=1e-8)


def test_the_problem_separates_the_weightings_and_clips_some_steps():
    trained = FedAvg(CLIPPED).round([0, 1, 2, 3])
    assert len({reply.num_steps for reply in trained.values()}) == 4
    plain = FedAvg(make_task()).round([0, 1, 2, 3])
    lengths = [np.linalg.norm(plain[i].path_gradient - trained[i].path_gradient) for i in trained]
    assert max(lengths) > 0.05
    norms = [
        np.linalg.norm(CLIPPED.gradient(CLIPPED.x0, rows, labels, CLIPPED.buffers0)[0])
        for client in range(len(SIZES))
        for rows, labels in CLIPPED.batches(client)
    ]
    assert min(norms) < CLIPPED.clip_norm < max(norms)


def test_buffers_are_weighted_by_examples_and_the_counter_takes_the_largest():
    twin = FedAvg(make_task())
    trained = twin.round([0, 3])
    np.testing.assert_allclose(twin.buffers.mean, (7 * trained[0].buffers.mean + 34 * trained[3].buffers.mean) / 41)
    assert twin.buffers.batches == 18  # 2 epochs of 9 batches


def test_float32_stays_float32():
    for twin in (FedAvgM, FedProx, SCAFFOLD, CRAFT, ConFIG, FedSAM, MoFedSAM, FedVSSAM):
        server = twin(make_task(np.float32))
        after(server, COHORTS[:2])
        assert server.x.dtype == np.float32
        assert server.buffers.var.dtype == np.float32


def test_fedavgm_limits():
    check_same(after(FedAvgM(CLIPPED, momentum=0)), after(FedAvg(CLIPPED)))
    check_same(after(FedAvgM(CLIPPED), COHORTS[:1]), after(FedAvg(CLIPPED), COHORTS[:1]))
    check_same(
        after(FedAvgM(CLIPPED, momentum=0.7, nesterov=True), COHORTS[:1]),
        after(FedAvg(CLIPPED, server_lr=1.7), COHORTS[:1]),
    )


def test_fedprox_limits():
    check_same(after(FedProx(CLIPPED, mu=0)), after(FedAvg(CLIPPED)))
    strong = FedProx(make_task(), mu=5.0)
    moved = [np.linalg.norm(after(server, COHORTS[:1]) - server.task.x0) for server in (strong, FedAvg(make_task()))]
    assert moved[0] < 0.5 * moved[1]


def test_fedprox_works_less_for_a_looser_gamma():
    task = make_task(epochs=4)
    steps = [
        sum(reply.num_steps for reply in FedProx(task, gamma=gamma).round([0, 1, 2, 3]).values())
        for gamma in (0.0, 0.3, 0.5, 0.8)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[1] > steps[-1]


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_scaffold_option_2_keeps_the_mean_path_gradient_and_c_the_mean_of_the_c_i(weighting):
    twin = SCAFFOLD(CLIPPED, weighting=weighting, known=5)
    for t, cohort in enumerate([[0, 2], [1, 2, 4], [0, 5, 7], [3, 6]]):
        if t == 2:
            twin.meet([5, 6, 7])
        for i, reply in twin.round(cohort).items():
            check_same(twin.controls[i], reply.path_gradient)
        mass = np.array([twin.mass(i) for i in twin.controls])
        check_same(twin.control, mass @ np.stack(list(twin.controls.values())) / mass.sum())


def test_scaffold_first_round_is_fedavg():
    check_same(after(SCAFFOLD(CLIPPED, weighting="examples"), COHORTS[:1]), after(FedAvg(CLIPPED), COHORTS[:1]))


def test_scaffold_option_1_keeps_the_gradient_at_x():
    twin = SCAFFOLD(make_task(), option=1)
    x, buffers = twin.x, twin.buffers
    twin.round([0, 3])
    check_same(twin.controls[3], twin.task.full_gradient(3, x, buffers))
    check_same(twin.control, (twin.controls[0] + twin.controls[3]) / 8)


def test_constrained_direction():
    rng = np.random.default_rng(3)
    U = rng.normal(size=(6, 40))
    U /= np.linalg.norm(U, axis=1, keepdims=True)
    rho = np.array([0.3, 0.1, 0.2, 0.15, 0.15, 0.1])
    r = rng.normal(size=40)
    r /= np.linalg.norm(r)
    g = constrained(U, rho, r, 1e-10, 10.0)
    check_same(U @ g, rho)
    check_same(np.linalg.lstsq(U.T, g - r, rcond=None)[0] @ U, g - r)  # g - r lies in the rows' span
    off_rows = r - np.linalg.pinv(U) @ (U @ r)
    check_same(g @ g, off_rows @ off_rows + np.sum((np.linalg.pinv(U) @ rho) ** 2))
    check_same(constrained(U, U @ r, r, 1e-10, 10.0), r)
    order = [3, 1, 0, 5, 2, 4]
    check_same(constrained(U[order], rho[order], r, 1e-10, 10.0), g)
    check_same(constrained(np.eye(6, 40), rho, np.zeros(40), 1e-10, 10.0), rho @ np.eye(6, 40))


def test_constrained_direction_between_near_duplicates():
    rho, zero = np.array([0.7, 0.3]), np.zeros(2)
    for cosine, length in ((0.999, 9), (0.9999, 28), (0.99999, 89)):
        U = np.array([[1, 0], [cosine, np.sqrt(1 - cosine**2)]])
        assert round(float(np.linalg.norm(constrained(U, rho, zero, 1e-3, np.inf)))) == length
    U = np.array([[1, 0], [0.9999, np.sqrt(1 - 0.9999**2)]])
    assert np.linalg.norm(constrained(U, rho, zero, 1e-3, 10.0)) < 1
    twice = np.array([[1.0, 0.0], [1.0, 0.0]])
    check_same(twice @ constrained(twice, rho, zero, 1e-3, 10.0), np.array([0.5, 0.5]))
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0]])
    check_same(opposite @ constrained(opposite, rho, zero, 1e-3, 10.0), np.array([0.2, -0.2]))


def test_craft_serves_every_client_by_its_share_in_every_layer():
    twin = CRAFT(CLIPPED)
    for cohort in COHORTS:
        x = twin.x
        trained = twin.round(cohort)
        for at in twin.groups.values():
            D = np.stack([x[at] - reply.y[at] for reply in trained.values()])
            gains = D @ (x[at] - twin.x[at]) / 0.1 / np.linalg.norm(D, axis=1)
            np.testing.assert_allclose(gains, list(twin.examples_share(trained).values()), atol=1e-10)


def test_craft_with_one_client():
    x0 = CLIPPED.x0
    raw = CRAFT(CLIPPED, server_lr=1.0, single_client="raw")
    check_same(after(raw, [[3], [5]]), after(FedAvg(CLIPPED), [[3], [5]]))
    twin = CRAFT(CLIPPED, server_lr=1.0, grouping="model")
    first = twin.round([3])[3]
    u = (x0 - first.y) / np.linalg.norm(x0 - first.y)
    check_same(x0 - twin.x, u)
    x = twin.x
    second = twin.round([5])[5]
    v = (x - second.y) / np.linalg.norm(x - second.y)
    check_same(x - twin.x, u + v * (1 - u @ v))


def test_craft_averages_where_nobody_is_active_and_keeps_the_reference():
    idle = CRAFT(CLIPPED, server_lr=0.5, min_norm=1e9)
    check_same(after(idle), after(FedAvg(CLIPPED, server_lr=0.5)))
    twin = CRAFT(CLIPPED)
    twin.round([0, 3])
    before = {q: g.copy() for q, g in twin.previous.items()}
    twin.min_norm = 1e9
    twin.round([1, 2])
    for q, g in before.items():
        np.testing.assert_array_equal(twin.previous[q], g)


def test_config_lengths_share_the_direction_of_craft_without_reference():
    x0, cohort = CLIPPED.x0, [[0, 1, 3]]
    steps = {
        length: x0 - after(ConFIG(CLIPPED, length=length, grouping="model"), cohort)
        for length in ("raw", "projection", "mean_norm")
    }
    check_same(steps["raw"], x0 - after(CRAFT(CLIPPED, server_lr=1.0, grouping="model"), cohort))
    b = steps["raw"] / np.linalg.norm(steps["raw"])
    D = {i: x0 - reply.y for i, reply in FedAvg(CLIPPED).round([0, 1, 3]).items()}
    p = {i: CLIPPED.num_examples(i) / 53 for i in D}
    check_same(steps["projection"], sum(p[i] * (D[i] @ b) for i in D) * b)
    check_same(steps["mean_norm"], sum(p[i] * np.linalg.norm(D[i]) for i in D) * b)


def test_fedsam_limits():
    check_same(after(FedSAM(CLIPPED, rho=0)), after(FedAvg(CLIPPED)))
    assert np.linalg.norm(after(FedSAM(CLIPPED)) - after(FedAvg(CLIPPED))) > 1e-3


def test_fedvssam_is_a_moving_average_of_sam_gradients():
    twin = FedVSSAM(CLIPPED)
    for cohort in COHORTS:
        h = twin.h
        trained = twin.round(cohort)
        seen = sum(reply.path_gradient for reply in trained.values()) / len(trained)
        check_same(twin.h, (1 - 0.4 * 0.6) * h + 0.4 * 0.6 * seen)


def test_fedvssam_limits():
    check_same(
        after(FedVSSAM(CLIPPED, gamma_l=0.3, gamma_g=1.0, perturb="gradient")),
        after(MoFedSAM(CLIPPED, alpha=0.3)),
    )
    one = [[0], [3], [5]]  # with one client a round the uniform mean is the weighted one
    check_same(after(FedVSSAM(CLIPPED, gamma_l=1.0, gamma_g=1.0), one), after(FedSAM(CLIPPED), one))
    check_same(after(FedVSSAM(CLIPPED, rho=0, gamma_l=1.0, gamma_g=1.0), one), after(FedAvg(CLIPPED), one))
    check_same(
        after(FedVSSAM(CLIPPED, gamma_l=0.3, gamma_g=1.0, perturb="gradient", update="gradient"), one),
        after(FedSAM(CLIPPED), one),
    )
    check_same(after(MoFedSAM(CLIPPED, alpha=1.0), one), after(FedSAM(CLIPPED), one))


def test_fedvssam_absolute_rate_is_the_step_along_h():
    twin = FedVSSAM(CLIPPED, server_lr=2.5, server_lr_scale="absolute")
    x = twin.x
    twin.round([0, 3])
    check_same(twin.x, x - 2.5 * twin.h)
