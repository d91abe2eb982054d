"""The page of `fedstrat report`: what it holds, what it leaves out, and that it needs nothing but itself."""

import colorsys
import json
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrat.cli import app as command_line
from fedstrat.data.clients import assign
from fedstrat.errors import ConfigError
from fedstrat.metrics.fairness import fairness
from fedstrat.metrics.rounds import RoundReport, Traffic
from fedstrat.page import figures, numbers
from fedstrat.page.gather import gather
from fedstrat.page.page import write
from fedstrat.page.partition import label_counts
from fedstrat.runs.config import parse
from fedstrat.runs.history import RunFolder

EVIL = "<script>alert('x')</script>"
ROUNDS = 4


def make_run(folder: Path, algorithm: str = "fedavg", seed: int = 1, *, end: bool = True, rounds: int = ROUNDS,
             level: float = 0.5, **config: Any) -> Path:  # fmt: skip
    """A results folder as a run leaves it, with accuracies that depend on ``level`` and ``seed``."""
    flat = dict(parse({
        "algorithm": algorithm, "seed": seed, "num-server-rounds": ROUNDS, "num-clients": 8, **config,
    }).flat)  # fmt: skip
    run = RunFolder(folder, flat, num_parameters=650, run_id=7)
    for number in range(1, rounds + 1):
        correct = [int(100 * min(1.0, (level + 0.01 * seed) * number / ROUNDS + 0.04 * client)) for client in range(8)]
        counts = {str(client): (right, 200.0 / number, 100) for client, right in enumerate(correct)}
        run.record(RoundReport(
            round=number, num_rounds=ROUNDS, seconds=2.0, aggregated=True, trained=("0", "1"), counts=counts,
            fairness=fairness(counts), train={"train-loss": 2.0 / number},
            diagnostics={"conflict-rate": 0.25 * seed, "min-cosine": -0.5, "drift-mean": 1.0, "drift-max": 2.0,
                         "update-rank": 2.0, **({"sharpness": 0.125} if number == ROUNDS else {})},
            layers={"layers.0": {"conflict-rate": 0.5}, "layers.1": {"conflict-rate": 0.0}},
            traffic=Traffic(train_up_payload=1000, train_down_payload=3000, train_dense_payload=8000),
        ))  # fmt: skip
    if end:
        run.finish("completed")
    return folder


class Page(HTMLParser):
    """A page's elements: tags with attributes, the text of headings, and the tables' cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self._cell = False
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._cell:
            self.rows[-1][-1] += data

    def row(self, *start: str) -> list[str]:
        return next(row for row in self.rows if row[: len(start)] == list(start))


def make_page(tmp_path: Path, *folders: Path, **options: Any) -> Page:
    write(folders or [tmp_path], tmp_path / "page.html", **options)
    assert not list(tmp_path.glob(".page*"))
    return Page((tmp_path / "page.html").read_text(encoding="utf-8"))


@pytest.fixture
def several(tmp_path: Path) -> Path:
    for seed in (1, 2, 3):
        make_run(tmp_path / f"a{seed}", "fedavg", seed)
        make_run(tmp_path / f"c{seed}", "craft", seed, level=0.7)
    return tmp_path


def test_the_page_needs_nothing_but_itself(several: Path) -> None:
    page = make_page(several)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action", "poster"):
                assert (value or "").startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"https?:|@import|url\((?!#)", page.text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_pictures_say_what_they_show(several: Path) -> None:
    pictures = [a for tag, a in make_page(several).tags if tag == "svg" and "aria-hidden" not in a]
    assert len(pictures) >= 10
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)


def test_runs_that_differ_in_their_seed_alone_are_one_row_of_means(several: Path) -> None:
    page = make_page(several)
    finals = [json.loads((several / f"c{seed}" / "summary.json").read_text())["final"] for seed in (1, 2, 3)]
    row = page.row("craft", "3")
    for place, name in ((2, "mean"), (4, "best10"), (5, "worst10"), (8, "loss")):
        values = [final[name] for final in finals]
        assert row[place] == f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    assert page.row("fedavg", "3")[2] < row[2]
    assert "Highest at the end: craft" in page.text


def test_cost_and_diagnostics_are_the_runs_own_numbers(several: Path) -> None:
    page = make_page(several)
    cost = next(row for row in page.rows if row[0] == "fedavg" and "kB" in " ".join(row))
    assert cost[1:2] + cost[4:8] == ["4", "4 kB", "12 kB", "0.50", "8 s"]  # 4 rounds of 1000 up, 3000 down, 8000 dense
    updates = next(row for row in page.rows if row[0] == "fedavg" and "-0.5" in row)
    assert updates[1:] == ["0.5", "-0.5", "2", "1", "2", "0.125"]  # conflict rate .25, .5, .75


def test_settings_that_differ_come_first_and_name_the_groups(tmp_path: Path) -> None:
    for rate in (0.1, 0.5):
        make_run(tmp_path / f"r{rate}", "craft", 1, **{"train.lr": rate})
    make_run(tmp_path / "other", "fedavg", 1)
    page = make_page(tmp_path)
    assert page.row("", "train.lr") == ["", "train.lr"]
    for label, rate in (("craft, lr 0.1", "0.1"), ("craft, lr 0.5", "0.5"), ("fedavg", "0.05")):
        assert page.row(label, rate) == [label, rate]
    assert page.row("num-clients") == ["num-clients", "8"]
    text = " ".join(page.words)
    assert text.index("train.lr") < text.index("num-clients")
    assert "reference-decay 0.9" in text  # CRAFT's own
    assert "fedprox" not in text  # nobody runs FedProx


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        # One key tells them apart; the others that differ are in the table of settings alone.
        (({"train.lr": 0.1, "train.local-epochs": 1, "dataset.alpha": 0.5}, {"train.lr": 0.5, "train.local-epochs": 2}),
         ["craft, alpha 0.5", "craft, alpha 0.1"]),
        (({"train.lr": 0.1, "train.local-epochs": 1}, {"train.lr": 0.2, "train.local-epochs": 1},
          {"train.lr": 0.2, "train.local-epochs": 2}),
         ["craft, local-epochs 1, lr 0.1", "craft, local-epochs 1, lr 0.2", "craft, local-epochs 2, lr 0.2"]),
        (({"num-server-rounds": 4}, {"num-server-rounds": 9}), ["craft, 4 rounds", "craft, 9 rounds"]),
        (({}, {"dataset.name": "mnist"}, {"dataset.name": "mnist", "train.lr": 0.5}),
         ["craft, digits, lr 0.05", "craft, mnist, lr 0.05", "craft, mnist, lr 0.5"]),
    ],
)  # fmt: skip
def test_labels_hold_what_tells_groups_apart_and_no_more(
    tmp_path: Path, settings: tuple[dict[str, Any], ...], labels: list[str]
) -> None:
    for place, config in enumerate(settings):
        make_run(tmp_path / str(place), "craft", **{"dataset.alpha": 0.1, **config})
    assert [group.label for group in gather([tmp_path]).groups] == labels


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **{"dataset.dir": EVIL, "dataset.name": "npz"})
    contents = json.loads((run / "config.json").read_text())
    contents["run_config"]["algorithm"] = EVIL
    contents["run_config"][EVIL] = EVIL
    (run / "config.json").write_text(json.dumps(contents))
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    for line in lines:
        line["layers"] = {EVIL + "$x_{": {"conflict-rate": 0.5}, "b": {"conflict-rate": 0.5}}
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "published.json").write_text(json.dumps({"source": EVIL, "rows": {EVIL: {EVIL: EVIL}}}))
    page = make_page(tmp_path, title=EVIL)
    assert "<script" not in page.text.lower()
    assert "alert('x')" in "".join(page.words)  # it is shown, as text


def test_published_numbers_stand_beside_ours(several: Path) -> None:
    rows = {
        "CRAFT": {"mean": 0.564, "worst10": 0.2},
        "fedprox": {"mean": "52.1 %"},
        "fedavg": {"accuracy %": 61.5, "gain": "+3 %"},
    }
    (several / "published.json").write_text(json.dumps({"source": "Table 1 of the paper", "rows": rows}))
    page = make_page(several)
    ours = page.row("craft", "3")
    plain = page.row("fedavg", "3")
    percent = " ± ".join(f"{100 * float(part):.1f}" for part in plain[3].split(" ± "))
    head = page.row("", "mean: published")
    assert head[1:] == [
        "mean: published", "here", "worst10: published", "here", "accuracy %: published", "here", "gain: published",
    ]  # fmt: skip
    assert page.row("CRAFT")[:5] == ["CRAFT", "0.564", ours[2], "0.2", ours[5]]
    assert page.row("fedprox") == ["fedprox", "52.1 %", "–", "–", "–", "–", "–", "–"]
    found = page.row("fedavg", "–")
    assert found[5:6] + found[7:] == ["61.5", "+3 %"]
    assert [round(float(part), 1) for part in found[6].split(" ± ")] == [float(part) for part in percent.split(" ± ")]
    assert "Table 1 of the paper" in page.text
    (several / "published.json").write_text("[1]")
    assert "published.json: expected an object" in make_page(several).text


def test_of_a_comparison_the_chosen_settings_are_shown_under_its_labels(tmp_path: Path) -> None:
    recipe = {
        "title": "Ours",
        "methods": [
            {"label": "Plain", "algorithm": "fedavg", "fixed": {}, "grid": {"train.lr": [0.1, 0.5]}},
            {"label": "Plain, one seed", "algorithm": "fedavg", "fixed": {"train.momentum": 0.5}, "grid": {}},
        ],
        "published": {"source": "Table 1", "rows": {"Plain": {"mean": 0.9}}},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "table.csv").write_text('method,setting,mean\nPlain,lr 0.1,0.5\n"Plain, one seed",,0.5\n')
    for seed, rate in ((1, 0.1), (2, 0.1), (1, 0.5)):
        make_run(tmp_path / "cells" / f"{rate}-{seed}", "fedavg", seed, level=rate, **{"train.lr": rate})
    make_run(tmp_path / "cells" / "m", "fedavg", 1, **{"train.momentum": 0.5})
    page = make_page(tmp_path)
    assert "Of 3 settings this page shows the 2 that validation data chose" in page.text
    ours = page.row("Plain", "2")
    assert page.row("Plain", "0.9") == ["Plain", "0.9", ours[2]]
    assert page.row("Plain, one seed", "1")
    recipe["methods"].reverse()
    for methods in (["Plain, one seed", "Plain"], ["Plain", "Plain, one seed"]):
        (tmp_path / "recipe.json").write_text(json.dumps(recipe))
        assert [group.label for group in gather([tmp_path]).groups] == methods
        recipe["methods"].reverse()


def test_of_repeated_runs_of_one_seed_the_newest_complete_one_counts(tmp_path: Path) -> None:
    for name, day, level, end in (
        ("z", 1, 0.1, True), ("b", 3, 0.5, True), ("a", 2, 0.2, True), ("c", 4, 0.3, False),
    ):  # fmt: skip
        device = "cpu" if day == 1 else "auto"
        run = make_run(tmp_path / name, level=level, end=end, **{"train.device": device, "aggregation-device": device})
        contents = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**contents, "started": f"2026-11-0{day}T00:00:00+00:00"}))
    make_run(tmp_path / "other", seed=2, level=0.5)
    found = gather([tmp_path])
    assert [run.recorded.path.name for group in found.groups for run in group.runs] == ["b", "other"]
    assert any("fedavg: 3 repeated runs were left out" in problem for problem in found.problems)
    for name in ("z", "a", "c", "other"):
        shutil.rmtree(tmp_path / name)
    make_run(tmp_path / "again", level=0.1, end=False)
    page = make_page(tmp_path)
    assert page.row("fedavg", "1")[2] == f"{json.loads((tmp_path / 'b/summary.json').read_text())['final']['mean']:.3f}"
    assert "1 repeated run was left out" in page.text
    assert "still going" not in page.text


def bold(page: Page) -> list[str]:
    """The cells in bold of the results' first column of scores, with their rows' titles."""
    rows = re.findall(r'<th scope="row">([^<]*)</th><td>[^<]*</td><td( class="best")?>', page.text)
    return [title for title, best in rows if best]


def test_only_runs_on_equal_data_after_as_many_rounds_are_ranked(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", level=0.3)
    make_run(tmp_path / "b", "craft", level=0.4)
    make_run(tmp_path / "c", "fedprox", level=0.6, **{"dataset.name": "mnist", "dataset.dir": str(tmp_path / "no")})
    make_run(tmp_path / "d", "fedsam", level=0.1, rounds=8, **{"num-server-rounds": 8})
    page = make_page(tmp_path)
    lead = re.search(r'<p class="lead">([^<]*)', page.text)
    assert lead is not None
    assert lead[1].startswith("These runs differ in data set and number of rounds; only those equal in these are")
    assert "digits, 4 rounds: highest at the end craft" in lead[1]
    assert "next fedavg" in lead[1]
    assert "fedprox" not in lead[1]
    assert "fedsam" not in lead[1]
    assert bold(page) == ["craft, digits"]
    assert "among runs with equal data set" in page.text
    shutil.rmtree(tmp_path / "b")
    page = make_page(tmp_path)
    assert "so none is ranked above another" in page.text
    assert bold(page) == []
    alone = make_page(tmp_path, tmp_path / "a", tmp_path / "a")
    assert "The global model ends with" in alone.text


def test_failed_runs_take_no_rows(tmp_path: Path) -> None:
    make_run(tmp_path / "good", "craft")
    for seed in (1, 2):
        run = make_run(tmp_path / f"bad{seed}", "fedavg", seed, rounds=seed, end=False)
        RunFolder.reopened(gather([run]).groups[0].runs[0].recorded).finish("failed", error="no data\nat all.")
    make_run(tmp_path / "none", "scaffold", rounds=0)
    found = gather([tmp_path])
    assert [group.label for group in found.groups] == ["craft"]
    assert len(found.problems) == 1
    for said in ("3 runs have no row", "fedavg, seed 1 (bad1): failed after round 1 of 4: no data at all;",
                 "scaffold, seed 1 (none): ended early, after round 0"):  # fmt: skip
        assert said in found.problems[0]


def test_a_folder_with_a_log_alone_costs_a_sentence(tmp_path: Path) -> None:
    (make_run(tmp_path / "good") / "run.log").touch()
    for place in ("r/early", "r/deeper/early"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "run.log").write_text("Error: no such data")
    found = gather([tmp_path])
    assert [problem.split(": ")[0] for problem in found.problems] == [
        f"{tmp_path / place} was left out" for place in ("r/deeper/early", "r/early")
    ]
    with pytest.raises(ConfigError, match=r"early was left out: it has run\.log but no config\.json"):
        gather([tmp_path / "r" / "early"])


def test_broken_and_unfinished_folders_cost_a_sentence(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    make_run(tmp_path / "going", "craft", end=False, rounds=2)
    make_run(tmp_path / "empty", "scaffold", rounds=0, end=False)
    torn = make_run(tmp_path / "torn", "fedprox", rounds=3, end=False)
    with (torn / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "me')
    for name, text in (("damaged", "{"), ("list", "[]"), ("bare", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    old = make_run(tmp_path / "old", "fedsam")
    (old / "history.jsonl").write_text('{"round": 1}\n')
    (tmp_path / "nothing").mkdir()
    page = make_page(tmp_path, tmp_path, tmp_path / "nothing")
    for word in ("damaged", "list", "bare", "old", "nothing"):
        assert re.search(rf"/{word}\S* (was left out|holds no run)", page.text), word
    assert "craft, seed 1: still going, or killed: no summary.json; what is shown is the state after round 2 of 4" in (
        page.text
    )
    assert "scaffold, seed 1 (empty): still going" in page.text
    assert not [row for row in page.rows if row[0] == "scaffold"]
    assert page.row("fedprox", "1")[2] != "–"
    with pytest.raises(ConfigError, match="no run to report on"):
        write([tmp_path / "nothing"], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("status", "config", "said"),
    [
        ("failed", {}, "failed after round 2 of 4: the disk is full"),
        ("completed", {"target-accuracy": 0.3}, "reached the target 0.3"),
        ("completed", {}, "ended early, after round 2 of 4: the reason was not written down"),
    ],
)
def test_a_run_that_ended_early_says_why(tmp_path: Path, status: Any, config: dict[str, Any], said: str) -> None:
    run = make_run(tmp_path / "run", rounds=2, end=False, **config)
    folder = RunFolder.reopened(gather([run]).groups[0].runs[0].recorded)
    folder.finish(status, error="the disk is full" if status == "failed" else "")
    assert said in make_page(tmp_path).text


def test_a_run_without_evaluation_or_diagnostics_has_a_page(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", dict(parse({"fraction-evaluate": 0.0, "num-clients": 0}).flat))
    for number in (1, 2):
        folder.record(RoundReport(round=number, num_rounds=30, seconds=1.0, aggregated=False, failed={"1": "late"}))
    page = make_page(tmp_path)
    assert "No round of these runs was evaluated" in page.text
    assert "measured nothing about the clients" in page.text
    assert "num-clients is 0" in page.text


def test_the_partition_is_the_one_that_the_clients_had() -> None:
    config = parse({"num-clients": 6, "dataset.alpha": 0.5, "seed": 4}).flat
    counts = label_counts(config)
    for client in range(6):
        own = assign(config, {"partition-id": client, "num-partitions": 6})
        held = own.source.y[np.concatenate([own.train, own.test])]
        assert counts[:, client].tolist() == [int((held == k).sum()) for k in range(10)]
    assert counts.sum() == 1797


@pytest.mark.parametrize(
    ("name", "held"),
    [("mnist", ()), ("mnist", (".download.lock",)), ("mnist", ("MNIST/raw/train-images-idx3-ubyte",)), ("mnist", None),
     ("femnist", (".download.lock",)), ("dbpedia14", (".download.lock",))],
)  # fmt: skip
def test_data_that_is_not_here_costs_the_picture_and_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, held: tuple[str, ...] | None
) -> None:
    def fetched(*arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr("fedstrat.data.files._download", fetched)
    monkeypatch.setattr("fedstrat.data.hub.fetch", fetched)
    where = tmp_path / "data"
    for file in held or ():  # what an interrupted download leaves
        (where / file).parent.mkdir(parents=True, exist_ok=True)
        (where / file).touch()
    if held == ():
        where.mkdir()
    config = parse({
        "dataset.name": name, "dataset.dir": str(where), "num-clients": 8, "dataset.partition": "iid",
        "model.name": "textcnn" if name == "dbpedia14" else "mlp",
    }).flat  # fmt: skip
    with pytest.raises(
        LookupError, match=f"'{name}' isn't complete in {re.escape(str(where))}, and nothing is fetched"
    ):
        label_counts(config)
    assert where.exists() == (held is not None)
    if name != "dbpedia14":
        where.mkdir(exist_ok=True)
        np.savez(where / "train.npz", x=np.zeros((400, 28, 28), np.uint8), y=np.arange(400) % 10)
        assert label_counts(config).sum() == 400


def test_series_look_unlike_their_neighbours(tmp_path: Path) -> None:
    looks = [figures.look(place) for place in range(figures.MOST_CURVES)]
    assert len(set(looks)) == len(looks)

    def hue(colour: str) -> float:
        return colorsys.rgb_to_hsv(*(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)))[0]

    for place, (colour, _) in enumerate(looks):
        for other, _ in looks[place + 1 : place + 3]:
            # Slate, grey to the eye, is unlike every colour.
            assert "#2B3138" in (colour, other) or abs(hue(colour) - hue(other)) > 0.03, (colour, other)
    for place in range(8):
        make_run(tmp_path / str(place), **{"train.lr": 0.01 * (place + 1)})
    page = make_page(tmp_path)
    for place in range(8):
        colour, dash = looks[place]
        line = (
            f'style="stroke: var(--c{figures.COLOURS.index(colour)})" class="{dash}"/></svg>fedavg, lr 0.0{place + 1}<'
        )
        assert line in page.text


def test_numbers_as_people_read_them() -> None:
    assert numbers.spread([0.5, None]) == "0.500"
    assert numbers.spread([1.0, 2.0, 3.0], 1) == "2.0 ± 1.0"
    assert numbers.spread([None]) == "–"
    assert [numbers.size(n) for n in (999, 1234, 5.678e6, 2e9, 3e12, None)] == [
        "999 B", "1.23 kB", "5.68 MB", "2 GB", "3 TB", "–",
    ]  # fmt: skip
    assert [numbers.duration(s) for s in (1.234, 600, 9000, None)] == ["1.23 s", "10 min", "2.5 h", "–"]


def test_the_command_names_the_page_and_warns_of_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", end=False)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    out = tmp_path / "page.html"
    command_line(["report", str(tmp_path), "--out", str(out), "--title", "Ours"], standalone_mode=False)
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    assert "bad was left out" in said.err
    assert "<h1>Ours</h1>" in out.read_text()
    with pytest.raises(ConfigError, match="can't write"):
        write([tmp_path / "run"], tmp_path / "no" / "page.html")


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name))), "")


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
@pytest.mark.slow
def test_a_browser_lays_it_out_without_sideways_scrolling(several: Path) -> None:
    make_page(several)
    page = several / "page.html"
    # The window tells its own widths in its title, which --dump-dom shows.
    probe = "<script>document.title = [document.documentElement.scrollWidth, innerWidth].join('/')</script></body>"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    (several / "probe.html").write_text(text.replace("</body>", probe))
    for width in (1280, 500):
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={several / 'browser'}",
             f"--window-size={width},900", "--dump-dom", (several / "probe.html").as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        found = re.search(r"<title>(\d+)/(\d+)</title>", done.stdout)
        assert found is not None
        assert int(found[1]) <= int(found[2])
