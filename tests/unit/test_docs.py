"""Every Python block of the documentation runs, and the pages of the algorithms are those that the code makes."""

import gc
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.clientapp import ClientApp

import fedstrat
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS
from tests.strategies import small

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Net(torch.nn.Module):
    """The reader's model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(small.FEATURES, 4)
        self.classifier = torch.nn.Linear(4, small.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.relu(self.encoder(x)))


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)
    gc.collect()


def prelude() -> dict[str, Any]:
    """What the reader's own app holds."""
    loader = small.batches(0)
    clients = small.client_app(Net)
    return {
        "__name__": "docs",
        "torch": torch,
        "fedstrat": fedstrat,
        "Net": Net,
        "SCAFFOLD": fedstrat.SCAFFOLD,
        "model": Net(),
        "arrays": fedstrat.to_arrays(Net()),
        "loader": loader,
        "dataset": range(small.SIZES[0]),
        "loss_fn": torch.nn.functional.cross_entropy,
        "app": ClientApp(),
        "client_app": clients,
        "grid": InProcessGrid(clients, 10, [{"partition-id": i % 5, "client-id": str(i)} for i in range(10)]),
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_python_block_runs(path: Path) -> None:
    blocks = BLOCK.findall(path.read_text())
    names = prelude()
    for block in blocks:
        names |= {"app": ClientApp(), "grid": prelude()["grid"]}
        first = path.read_text()[: path.read_text().index(block)].count("\n") + 1
        exec(compile("\n" * (first - 1) + block, str(path), "exec"), names)
        app = names["app"]
        if "@app.train()" in block:  # the handlers were only defined: run them
            # A block whose handler takes no closure serves the rules of one pass.
            closure = "fedstrat.train(" in block or "optimizer.step(lambda" in block
            for strategy in (fedstrat.SCAFFOLD, *([fedstrat.FedVSSAM] if closure else [])):
                options = {} if "@app.evaluate()" in block else {"fraction_evaluate": 0.0}
                grid = InProcessGrid(app, 2)
                strategy(**options).start(grid=grid, initial_arrays=names["arrays"], num_rounds=2)
                assert not [e for e in grid.errors if "query" not in str(e)]


def test_the_algorithm_of_the_docs_is_mofedsam_without_its_perturbation() -> None:
    (block, _) = BLOCK.findall((ROOT / "docs/your-own-algorithm.md").read_text())
    names = prelude()
    exec(block, names)
    runs = [
        small.run(strategy(alpha=0.3, seed=2, fraction_train=0.6, fraction_evaluate=0.0, **more), small.convex)
        for strategy, more in ((names["FedCM"], {}), (fedstrat.MoFedSAM, {"rho": 0.0}))
    ]
    ours, theirs = (small.vector(run.result.arrays) for run in runs)
    assert ours == pytest.approx(theirs, abs=1e-7)
    assert ours != pytest.approx(small.vector(small.initial(small.convex)), abs=1e-3)


def pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("make_algorithm_pages", ROOT / "docs/make_algorithm_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, str] = module.pages()
    return made


def test_the_pages_of_the_algorithms_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in (ROOT / "docs/algorithms").glob("*.md")}
    assert written == pages(), "run: python docs/make_algorithm_pages.py"


def test_links_between_the_pages_lead_somewhere() -> None:
    for path in (*FILES, *(ROOT / "docs/algorithms").glob("*.md")):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_tables_of_measured_results_are_those_of_the_benchmark() -> None:
    made = (ROOT / "benchmarks/results/digits.md").read_text()
    rows = [line for line in made.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 23  # the head, and every method
    results, readme = (path.read_text().splitlines() for path in (ROOT / "docs/results.md", ROOT / "README.md"))
    assert [row for row in results if row in rows] == rows
    shown = [line for line in readme if line.startswith("| ") and " ± " in line]
    assert shown
    assert set(shown) <= set(rows)


def test_every_score_of_the_small_recipes_is_one_that_a_table_holds() -> None:
    tables = "".join(path.read_text() for path in (ROOT / "benchmarks/results/recipes").glob("*.md"))
    shown = (ROOT / "docs/results.md").read_text().partition("## Hardware and reading")[2]
    rows = [line for line in shown.splitlines() if line.startswith("| ") and " ± " in line]
    assert len(rows) > 40
    for row in rows:
        method = row.split(" | ")[0]
        for score in re.findall(r"\.\d{3} ± \.\d{3}", row):
            assert any(line.startswith(f"{method} |") and score in line for line in tables.splitlines()), row
