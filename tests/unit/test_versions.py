"""An unsupported Flower is refused at import, in one sentence and before anything of it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: {installed!r} if name == "flwr" else real(name)
sys.modules["flwr"] = None  # whoever imports it fails otherwise than we do
import {module}
"""


def importing(module: str, installed: str) -> "subprocess.CompletedProcess[str]":
    code = IMPORT.format(module=module, installed=installed)
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("module", ["fedstrat", "fedstrat.client", "fedstrat.simulation"])
@pytest.mark.parametrize("installed", ["1.31.0", "2.0.0", "0.9", "unknown"])
def test_an_unsupported_flower_is_refused_in_one_sentence(module: str, installed: str) -> None:
    done = importing(module, installed)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: fedstrat needs flwr>=1.32,<2, but flwr {installed} is installed; pip install 'flwr>=1.32,<2'"
    )


@pytest.mark.parametrize("installed", ["1.32.0", "1.39.0", "1.42.0", "1.50.0rc1", "1.99"])
def test_supported_ones_are_not(installed: str) -> None:
    done = importing("fedstrat", installed)
    assert done.returncode == 0, done.stderr
