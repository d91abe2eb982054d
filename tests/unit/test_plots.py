import math

import numpy as np
import pytest
from matplotlib.image import imread

from fedstrat.errors import ConfigError
from fedstrat.metrics.fairness import fairness
from fedstrat.metrics.rounds import RoundReport
from fedstrat.runs.history import RunFolder
from fedstrat.runs.report import draw

CONFIG = {"algorithm": "craft", "dataset.name": "digits"}


def report(number: int, counts: dict | None, **changes) -> RoundReport:
    scores = fairness(counts) if counts else None
    given = {"train": {"train-loss": 1.0 / number}, "aggregated": True, **changes}
    return RoundReport(round=number, num_rounds=9, seconds=1.0, counts=counts, fairness=scores, **given)


def clients(correct: list[int], loss: float = 5.0) -> dict:
    return {str(i): (c, loss, 10) for i, c in enumerate(correct)}


def pictures(tmp_path, *reports: RoundReport) -> dict[str, np.ndarray]:
    folder = RunFolder(tmp_path, CONFIG, num_clients=4)
    for each in reports:
        folder.record(each)
    paths = draw(tmp_path)
    assert [path.name for path in paths] == ["accuracy.png", "clients.png"]
    assert not list(tmp_path.glob(".*"))
    return {path.stem: imread(path)[:, :, :3] for path in paths}


def amount(picture: np.ndarray, colour: str, tolerance: float = 0.02) -> int:
    """Number of pixels of that colour."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(picture - rgb).max(axis=2) < tolerance).sum())


BLUE = "#0072B2"


@pytest.mark.parametrize(
    "reports",
    [
        [],
        [report(1, clients([3, 7, 10, 0]))],
        [report(1, clients([5])), report(2, clients([6]))],
        [report(1, None), report(2, None, aggregated=False, train={})],
        [report(1, clients([1, 2], math.nan), train={"train-loss": math.inf})],
        [report(1, clients([1, 2], 1e-3)), report(2, clients([1, 2], 1e30)), report(3, clients([1, 2], 0.0))],
        [report(1, {"0": (0, 0.0, 0)})],
        [report(i, clients(list(range(11)) * 30)) for i in range(1, 10)],
    ],
    ids=["nothing", "one-round", "one-client", "no-evaluation", "nan", "diverging", "no-test-data", "many"],
)
def test_every_kind_of_run_is_drawn_without_a_warning(tmp_path, reports):
    for picture in pictures(tmp_path, *reports).values():
        assert picture.std() > 0.01


def test_curves_and_bars_show_the_numbers(tmp_path):
    low = pictures(tmp_path / "low", *(report(i, clients([1, 1, 1, 2])) for i in (1, 2, 3)))
    high = pictures(tmp_path / "high", *(report(i, clients([8, 8, 8, 9])) for i in (1, 2, 3)))

    def height(picture: np.ndarray) -> float:
        """Mean row of the blue pixels in the upper half, left of the legend."""
        top = picture[: picture.shape[0] // 2]
        rgb = np.array([0x00, 0x72, 0xB2]) / 255
        rows, _ = np.nonzero(np.abs(top - rgb).max(axis=2) < 0.02)
        return float(rows.mean())

    assert height(high["accuracy"]) < height(low["accuracy"]) - 50
    # Light bars: the area under the outline grows with the accuracies.
    pale = "#A6CEE4"
    assert amount(high["clients"], pale, 0.03) > 2 * amount(low["clients"], pale, 0.03) > 0


def test_a_round_without_an_update_is_marked(tmp_path):
    mark = "#D55E00"
    fine = pictures(tmp_path / "fine", *(report(i, None) for i in (1, 2, 3)))
    failed = pictures(tmp_path / "failed", report(1, None), report(2, None, aggregated=False), report(3, None))
    assert amount(fine["accuracy"], mark) == 0
    assert amount(failed["accuracy"], mark) > 10


def test_drawing_again_replaces_the_pictures(tmp_path):
    pictures(tmp_path, report(1, clients([1, 2])))
    before = (tmp_path / "accuracy.png").read_bytes()
    RunFolder(tmp_path, CONFIG, resume=True).record(report(2, clients([9, 9])))
    draw(tmp_path)
    assert (tmp_path / "accuracy.png").read_bytes() != before


def test_no_run_no_picture(tmp_path):
    with pytest.raises(ConfigError, match="results folder"):
        draw(tmp_path)
