"""What stays light: `import fedstrat`, the ClientApp, and answering a query, all without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import fedstrat

QUERY = """
import sys

import fedstrat
import client_app.app
import fedstrat.errors, fedstrat.seeding, fedstrat.metrics.traffic, fedstrat.data.clients
assert "torch" not in sys.modules, "imports"

from flwr.app import ConfigRecord, Context, Message, RecordDict
from fedstrat.flower import borrow_identity
borrow_identity()
run_config = {
    "num-clients": 50, "seed": 1, "dataset.name": "digits", "dataset.dir": "", "dataset.partition": "dirichlet",
    "dataset.alpha": 0.1, "dataset.classes-per-client": 2, "dataset.min-size": 5, "dataset.test-fraction": 0.2,
    "train.batch-size": 20,
}
node_config = {"partition-id": 3, "num-partitions": 50}
context = Context(run_id=1, node_id=9, node_config=node_config, state=RecordDict(), run_config=run_config)
content = RecordDict({"config": ConfigRecord({"fedstrat.need-num-examples": True})})
reply = client_app.app.app(Message(content, 9, "query"), context)
about = reply.content["client"]
assert about["client-id"] == "3"
print(about["num-examples"])
assert "torch" not in sys.modules, "query"
"""


def test_importing_the_client_and_answering_a_query_needs_no_torch():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", QUERY], cwd=root, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # 50 clients share 1797 digits, at least 5 each, of which a fifth is for testing.
    assert 4 <= int(done.stdout.split()[-1]) < 1797


def test_public_names_are_those_that_are_announced():
    for name in dir(fedstrat):
        assert getattr(fedstrat, name) is not None
    for name in (
        "CRAFT", "FedVSSAM", "SCAFFOLD", "FedProx", "FedAvg", "FedAvgM", "ConFIG", "FedSAM", "MoFedSAM", "LocalSession",
        "train", "evaluate", "query", "to_arrays", "load_arrays",
    ):  # fmt: skip
        assert name in dir(fedstrat)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'FedAvgg'"):
        _ = fedstrat.FedAvgg
