"""Breaks the code on purpose: each edit is applied to a copy, and a test must notice.

A mutation that no test notices means that the tests would accept a wrong algorithm.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = "tests/strategies/test_reference.py"
REFERENCE_B = "tests/strategies/test_reference_b.py"
REFERENCE_C = "tests/strategies/test_reference_c.py"
REFERENCE_MORE = "tests/strategies/test_reference_more.py"
UPDATE_DTYPE = "tests/strategies/test_update_dtype.py"


@dataclass(frozen=True)
class Mutation:
    """One edit, and the tests of which at least one must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str = ""

    def __str__(self) -> str:
        return self.name


MUTATIONS = [
    Mutation(
        "SCAFFOLD: c and c_i swapped in the correction",
        "fedstrat/strategies/scaffold.py",
        "{n: c[n] - self.c_i[n] for n in c}",
        "{n: self.c_i[n] - c[n] for n in c}",
        REFERENCE,
        "SCAFFOLD-float64",
    ),
    Mutation(
        "SCAFFOLD: sign of option 2",
        "fedstrat/strategies/scaffold.py",
        "self.initial[name].to(c_i.dtype) - y.to(c_i.dtype)",
        "y.to(c_i.dtype) - self.initial[name].to(c_i.dtype)",
        "tests/strategies/test_scaffold.py",
    ),
    Mutation(
        "SCAFFOLD: 1/N lost, mean over the cohort",
        "fedstrat/strategies/scaffold.py",
        "share = [w / state.total for w in weights]",
        "share = [w / sum(weights) for w in weights]",
        "tests/strategies/test_scaffold.py",
    ),
    Mutation(
        "SCAFFOLD: a newcomer doesn't shrink c",
        "fedstrat/strategies/scaffold.py",
        "scale = total_before / state.total if state.total else 1.0",
        "scale = 1.0",
        "tests/strategies/test_scaffold.py",
    ),
    Mutation(
        "SCAFFOLD: weights by examples instead of uniform",
        "fedstrat/strategies/scaffold.py",
        'return self.weighting == "examples"',
        "return True",
        REFERENCE,
        "SCAFFOLD-float64",
    ),
    Mutation(
        "FedVSSAM: weights by examples instead of uniform",
        "fedstrat/strategies/direction.py",
        "[-share / u.lr_sum for u in moving]",
        "[-u.num_examples / sum(v.num_examples for v in moving) / u.lr_sum for u in moving]",
        REFERENCE,
        "FedVSSAM-float64",
    ),
    Mutation(
        "clip after the correction",
        "fedstrat/local/optimizer.py",
        "            self._decay_and_clip()\n            self.rule.correct_gradients()\n",
        "            self.rule.correct_gradients()\n            self._decay_and_clip()\n",
        REFERENCE,
        "clip_norm and float64",
    ),
    Mutation(
        "FedVSSAM: h updated after theta",
        "fedstrat/strategies/fedvssam.py",
        "params=moved(state.params, h, -eta)",
        "params=moved(state.params, state.direction, -eta)",
        REFERENCE,
        "FedVSSAM-float64",
    ),
    Mutation(
        "FedVSSAM: sign of the server's step",
        "fedstrat/strategies/fedvssam.py",
        "params=moved(state.params, h, -eta)",
        "params=moved(state.params, h, eta)",
        REFERENCE,
        "FedVSSAM-float64",
    ),
    Mutation(
        "FedVSSAM: gamma_l in the perturbation only",
        "fedstrat/strategies/fedvssam.py",
        "grad.mul_(self.gamma_l).add_(self.pull[name])",
        "grad.add_(self.pull[name])",
        REFERENCE,
        "FedVSSAM-float64",
    ),
    Mutation(
        "CRAFT: sign of the reference's correction",
        "fedstrat/aggregation/conflict.py",
        "target = _rho(rho_all[active]) - along",
        "target = _rho(rho_all[active]) + along",
        REFERENCE,
        "CRAFT-float64",
    ),
    Mutation(
        "CRAFT: weights uniform instead of by examples",
        "fedstrat/strategies/craft.py",
        "weights = state.params, [u.num_examples for u in updates]",
        "weights = state.params, [1.0 for u in updates]",
        REFERENCE,
        "CRAFT-float64",
    ),
    Mutation(
        "CRAFT: the reference isn't kept",
        "fedstrat/strategies/craft.py",
        "direction=remembered",
        "direction=state.direction",
        REFERENCE,
        "CRAFT-float64",
    ),
    Mutation(
        "FedProx: sign of the proximal term",
        "fedstrat/strategies/fedprox.py",
        "grad.add_(y - self.initial[name], alpha=self.mu)",
        "grad.sub_(y - self.initial[name], alpha=self.mu)",
        REFERENCE,
        "FedProx and mu and float64",
    ),
    Mutation(
        "FedAvgM: momentum lost",
        "fedstrat/strategies/fedavgm.py",
        "state.momentum[n].double().mul(beta)",
        "state.momentum[n].double().mul(0.0)",
        REFERENCE,
        "FedAvgM and float64",
    ),
    Mutation(
        "SAM: the perturbation goes downhill",
        "fedstrat/local/sam.py",
        "torch._foreach_add_(weights, torch._foreach_mul(directions, scale))",
        "torch._foreach_sub_(weights, torch._foreach_mul(directions, scale))",
        REFERENCE,
        "FedSAM and rho and float64",
    ),
    Mutation(
        "FedAvg: uniform instead of by examples",
        "fedstrat/strategies/fedavg.py",
        "normalised([u.num_examples for u in updates])",
        "normalised([1.0 for u in updates])",
        REFERENCE,
        "FedAvg-float64",
    ),
    Mutation(
        "buffers: uniform instead of by examples",
        "fedstrat/strategies/base.py",
        "weights = normalised([u.num_examples for u in summands])",
        "weights = normalised([1.0 for u in summands])",
        REFERENCE,
        "FedAvg-float64",
    ),
    Mutation(
        "client state: committed without being accepted",
        "fedstrat/local/state.py",
        'if store.round("pending") == accepted_round:',
        'if store.round("pending") is not None:',
        "tests/unit/test_state.py",
    ),
    Mutation(
        "FedNova: the steps stay in",
        "fedstrat/strategies/fednova.py",
        "factors = [tau * weight / norm for",
        "factors = [weight for",
        REFERENCE_MORE,
        "FedNova-float64",
    ),
    Mutation(
        "q-FedAvg: h without its quadratic term",
        "fedstrat/strategies/qfedavg.py",
        "self.q * L**2 * squared_distance(u.params, state.params) / loss + L",
        "L",
        REFERENCE_MORE,
        "QFedAvg and float64",
    ),
    Mutation(
        "AFL: lambda falls with the loss",
        "fedstrat/strategies/afl.py",
        "raised[u.client] += self.lambda_lr",
        "raised[u.client] -= self.lambda_lr",
        REFERENCE_MORE,
        "AFL and float64",
    ),
    Mutation(
        "FedMGDA+: the box lost",
        "fedstrat/strategies/fedmgdaplus.py",
        "(p - self.epsilon).clamp(min=0.0)",
        "torch.zeros_like(p)",
        REFERENCE_B,
        "FedMGDAPlus and float64",
    ),
    Mutation(
        "FedGAMMA: SCAFFOLD without a perturbation",
        "fedstrat/strategies/fedgamma.py",
        "for n, _, grad in self.trainable}, self.rho, again)",
        "for n, _, grad in self.trainable}, 0.0, again)",
        REFERENCE_MORE,
        "FedGAMMA and float64",
    ),
    Mutation(
        "FedSMOO: sign of the drift",
        "fedstrat/strategies/fedsmoo.py",
        "y - self.initial[name] + self.drift[name]",
        "y - self.initial[name] - self.drift[name]",
        REFERENCE_MORE,
        "FedSMOO and float64",
    ),
    Mutation(
        "FedACG: no look-ahead",
        "fedstrat/strategies/fedacg.py",
        "params=moved(x, m, self.momentum)",
        "params=x",
        REFERENCE_MORE,
        "FedACG and float64",
    ),
    Mutation(
        "MOON: towards the previous model",
        "fedstrat/strategies/moon.py",
        "cosine(z, z_p) - cosine(z, z_g)",
        "cosine(z, z_g) - cosine(z, z_p)",
        REFERENCE_B,
        "MOON and float64",
    ),
    Mutation(
        "FedNTD: distils towards itself",
        "fedstrat/strategies/fedntd.py",
        "before = self.received(x)",
        "before = logits",
        REFERENCE_B,
        "FedNTD and float64",
    ),
    Mutation(
        "Normalised FedAvgM: length lost",
        "fedstrat/strategies/normalisedfedavgm.py",
        "alpha=1.0 / length",
        "alpha=1.0",
        REFERENCE_MORE,
        "NormalisedFedAvgM and float64",
    ),
    Mutation(
        "FedSPU: everything moves",
        "fedstrat/strategies/fedspu.py",
        "torch.where(self.chosen[name], p, self.begun[name])",
        "p",
        "tests/strategies/test_fedspu.py",
        "nothing_outside",
    ),
    Mutation(
        "FedSPU: weights of those who sent nothing",
        "fedstrat/aggregation/units.py",
        "(scale * n / weight[at])",
        "(scale * n / sum(m for m, _, _ in sent))",
        REFERENCE_C,
        "FedSPU and float64",
    ),
    Mutation(
        "FedCSPACK: the most similar packs",
        "fedstrat/aggregation/packs.py",
        "torch.sort(theta[candidates], stable=True)",
        "torch.sort(-theta[candidates], stable=True)",
        REFERENCE_C,
        "FedCSPACK and top_k and float64",
    ),
    Mutation(
        "streaming: uniform instead of by examples",
        "fedstrat/aggregation/mean.py",
        "widened(self._origin[name]), alpha=weight)",
        "widened(self._origin[name]), alpha=self._weight)",
        "tests/strategies/test_streaming.py",
        "all_replies_at_once or by_hand",
    ),
    Mutation(
        "aggregation_device: a block is multiplied with what stayed on the CPU",
        "fedstrat/aggregation/gram.py",
        "products += rows @ rows.T",
        "products += rows @ block.T",
        "tests/strategies/test_aggregation_device.py",
    ),
    Mutation(
        "update_dtype: displacements taken off",
        "fedstrat/deltas.py",
        "copy=True).add_(b.to",
        "copy=True).neg_().add_(b.to",
        UPDATE_DTYPE,
        "FedAvg and by_hand",
    ),
    Mutation(
        "update_dtype: FedSMOO's h_i adds up what the server didn't see",
        "fedstrat/strategies/fedsmoo.py",
        "self.sent[n].detach()",
        "self.params[n].detach()",
        UPDATE_DTYPE,
        "stays_the_mean",
    ),
    Mutation(
        "FedCSPACK: the divergence the other way round",
        "fedstrat/aggregation/packs.py",
        "a.softmax(1).mul_(difference)",
        "b.softmax(1).mul_(-difference)",
        "tests/strategies/test_fedcspack.py",
        "every_pack_alone",
    ),
    Mutation(
        "FedCSPACK: error feedback forgets",
        "fedstrat/strategies/fedcspack.py",
        "e = self.unsent + (w - self.begun)",
        "e = w - self.begun",
        REFERENCE_C,
        "error_feedback and float64",
    ),
    Mutation(
        "Ditto: pushed away from the global model",
        "fedstrat/strategies/ditto.py",
        "FedProxRule(mu=self.lam, gamma=0.0)",
        "FedProxRule(mu=-self.lam, gamma=0.0)",
        REFERENCE_C,
        "Ditto and float64",
    ),
    Mutation(
        "FedFV: the highest losses are projected first",
        "fedstrat/strategies/fedfv.py",
        "order = sorted(range(m), key=losses.__getitem__)",
        "order = sorted(range(m), key=losses.__getitem__, reverse=True)",
        REFERENCE_B,
        "FedFV and float64",
    ),
    Mutation(
        "FedLF: the fairness objective downhill",
        "fedstrat/strategies/fedlf.py",
        "(even @ F) * F / norm**3 - even / norm",
        "even / norm - (even @ F) * F / norm**3",
        REFERENCE_B,
        "FedLF and float64",
    ),
    Mutation(
        "diagnostics: agreement counted as conflict",
        "fedstrat/aggregation/diagnostics.py",
        "(cosines < 0.0)",
        "(cosines > 0.0)",
        "tests/unit/test_diagnostics.py",
        "agreement",
    ),
    Mutation(
        "diagnostics: the loss down the slope",
        "fedstrat/local/sharpness.py",
        "losses[-1] - losses[0]",
        "losses[0] - losses[-1]",
        "tests/unit/test_diagnostics.py",
        "slope",
    ),
    Mutation(
        "diagnostics: packs that weren't sent count with the global values",
        "fedstrat/aggregation/packs.py",
        "row[places] = value[here]",
        "row += at; row[places] = value[here]",
        "tests/unit/test_diagnostics.py",
        "packs",
    ),
    Mutation(
        "report: bands of different settings mixed",
        "fedstrat/page/gather.py",
        "alike.setdefault(_text(_deciding(run.config)), [])",
        "alike.setdefault(str(run.config.get('algorithm')), [])",
        "tests/unit/test_page.py",
        "settings_that_differ",
    ),
    Mutation(
        "report: markup in names is markup",
        "fedstrat/page/page.py",
        "autoescape=True",
        "autoescape=False",
        "tests/unit/test_page.py",
        "markup",
    ),
    Mutation(
        "FedVSSAM's partition: samples drawn anew instead of in turn",
        "fedstrat/data/protocols.py",
        "np.resize(pool, len(turns))",
        "generator.choice(pool, len(turns))",
        "tests/unit/test_protocols.py",
    ),
    Mutation(
        "FedCSPACK's partition: full clients go on getting samples",
        "fedstrat/data/protocols.py",
        "* (sizes < fair)",
        "* (sizes < 2 * fair)",
        "tests/unit/test_protocols.py",
    ),
    Mutation(
        "Texts: the vocabulary sees the test part",
        "fedstrat/data/text.py",
        "rows.texts[:num_train], where, coding",
        "rows.texts, where, coding",
        "tests/unit/test_text.py",
    ),
    Mutation(
        "Texts: hashed words take the ids of padding and unknown",
        "fedstrat/data/text.py",
        "FIRST_WORD + zlib.crc32(word.encode()) % (vocab_size - FIRST_WORD)",
        "zlib.crc32(word.encode()) % vocab_size",
        "tests/unit/test_text.py",
    ),
    Mutation(
        "WRN: the shortcut skips norm and ReLU",
        "fedstrat/models/wideresnet.py",
        "self.shortcut(active)",
        "self.shortcut(x)",
        "tests/unit/test_models.py",
        "equations",
    ),
    Mutation(
        "compare: the luckiest seed chooses the setting",
        "fedstrat/experiments/selection.py",
        "statistics.fmean(-math.inf if run.validation is None else run.validation for run in runs)",
        "max(-math.inf if run.validation is None else run.validation for run in runs)",
        "tests/unit/test_experiment_selection.py",
    ),
    Mutation(
        "compare: failed runs are left out of the grid's mean",
        "fedstrat/experiments/selection.py",
        'run.final["mean"] if run.final else 0.0 for run in made',
        'run.final["mean"] for run in made if run.final',
        "tests/unit/test_experiment_selection.py",
    ),
    Mutation(
        "compare: differences to one seed of the first method",
        "fedstrat/experiments/selection.py",
        "- of_first[run.seed] for",
        "- next(iter(of_first.values())) for",
        "tests/unit/test_experiment_selection.py",
    ),
    Mutation(
        "recipes: published numbers of two tables mixed",
        "fedstrat/experiments/recipe.py",
        ' and key != "published"',
        "",
        "tests/unit/test_recipe.py",
        "published",
    ),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the selected tests need."""
    folder = tmp_path_factory.mktemp("mutated")
    for name in ("fedstrat", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_test_notices(mutation: Mutation, copy: Path) -> None:
    path = copy / mutation.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mutation.old) == 1, "the mutation doesn't fit the code any more; renew it"
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                mutation.tests,
                "-k",
                mutation.select,
            ],
            cwd=copy,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        path.write_text(source, encoding="utf-8")
    # 1 means that tests ran and one failed; anything else (nothing selected, an error) proves nothing.
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert " failed" in run.stdout
    assert " error" not in run.stdout.splitlines()[-1], run.stdout[-2000:]
