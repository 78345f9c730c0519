"""Many runs in one picture and one table: what differs, the best, and the order that a click gives."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

import pytest
from drawn import Drawing

from nbtrain.events import Progress
from nbtrain.views import cell_runs
from nbtrain.views.runs import RunCard, best_of, in_words, label_of, run_table, runs_html, runs_svg, runs_text, spread_lines, varying
from nbtrain.views.text import Board


def card(values: list[float], name: str = "Toy 1", status: str = "completed", mode: str = "min", **settings: str) -> RunCard:
    """A run with these validations, one an epoch."""
    rows = [{"epoch": epoch, "step": 9 * epoch, "val_loss": value} for epoch, value in enumerate(values, start=1)]
    header = {"monitor": "val_loss", "monitor_mode": mode, "title": "Toy"}
    board = Board(
        header=header, status=status, validations=list(rows), epochs=list(rows), rows=list(rows), progress=Progress(elapsed_s=3.0)
    )
    return RunCard(name, board, settings)


def of_rates(*rates: str) -> list[RunCard]:
    return [card([1.0, 1 / (i + 2)], lr=rate) for i, rate in enumerate(rates)]


def test_columns_are_what_differs_and_a_name_that_differs_alike_has_none() -> None:
    cards = [card([1.0], LR=lr, optimizer="SGD", lr=lr, seed=seed) for lr, seed in (("0.1", "0"), ("0.2", "0"), ("0.2", "1"))]
    assert varying(cards) == ["LR", "seed"]
    assert label_of(cards[2], ["LR", "seed"]) == "LR 0.2, seed 1" and label_of(cards[2], [], "run 2") == "run 2"


def test_a_setting_that_a_run_lacks_differs() -> None:
    assert varying([card([1.0], momentum="0.9"), card([1.0])]) == ["momentum"]


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 0)])
def test_the_best_run_has_the_star(mode: str, best: int) -> None:
    cards = [card([0.9, 0.7], mode=mode), card([0.8, 0.5], mode=mode), card([math.nan], mode=mode), card([], mode=mode)]
    assert best_of(cards) is cards[best]
    lines = runs_text(cards).splitlines()
    assert [line.endswith("★") for line in lines[1:5]] == [i == best for i in range(4)]
    assert lines[0].split() == ["run", "val_loss", "at", "epoch", "time"] and lines[4].split()[2] == "–"


def test_runs_that_are_compared_by_different_metrics_have_no_best() -> None:
    other = card([0.5])
    other.board.header["monitor"] = "train_loss"
    other.board.epochs = [{"epoch": 1, "step": 9, "train_loss": 0.1}]
    other.board.validations = []
    assert best_of([card([0.5]), other]) is None and "★" not in runs_text([card([0.5]), other])


def test_repeats_have_a_mean_and_a_standard_deviation_the_best_first() -> None:
    cards = [card([value], lr=lr, seed=seed) for lr, seed, value in (("1", "0", 0.5), ("1", "1", 0.7), ("2", "0", 0.1), ("2", "1", 0.3))]
    for number, each in enumerate(cards):
        each.tests = {"test_acc": float(number)}
    assert spread_lines(cards) == [
        "lr 2: 2 runs, val_loss 0.2 ± 0.14, test_acc 2.5 ± 0.71",
        "lr 1: 2 runs, val_loss 0.6 ± 0.14, test_acc 0.5 ± 0.71",
    ]
    assert spread_lines([card([0.2]), card([0.4])]) == ["all: 2 runs, val_loss 0.3 ± 0.14"]
    assert spread_lines(of_rates("1", "2")) == []
    continued = card([0.2])
    continued.board.epochs = [{**row, "epoch": 2} for row in continued.board.epochs]
    assert spread_lines([card([0.4]), continued]) == []
    changed = card([0.2])
    changed.board.marks.append((Progress(), "lr 0.1 → 0.01"))
    assert spread_lines([card([0.4]), changed]) == [], "another learning rate"


def picture_of(cards: list[RunCard]) -> Drawing:
    return Drawing(runs_svg(cards))


def test_one_line_for_each_run_the_best_in_front() -> None:
    svg = runs_svg([card([1.0, 0.5], lr="1"), card([1.0, 0.2], lr="2"), card([1.0, 0.9], lr="3")])
    lines = re.findall(r'<path class="run (c\d)( best)?"', svg)
    assert [kind for kind, _ in lines] == ["c0", "c7", "c4"] and [best for _, best in lines] == ["", "", " best"]  # light to dark with lr
    assert "★ lr 2" in svg


def test_more_runs_than_colours_are_a_ramp_over_the_setting_with_the_most_values() -> None:
    cards = [card([1.0, 1 / (i + 2)], lr=str(i), momentum=str(i % 3 / 4), kind=f"k{i % 2}") for i in range(9)]
    svg = runs_svg(cards)
    assert "lr 0<" in svg and "★ lr 8, momentum" in svg and len(Drawing(svg).words("strong")) == 2  # the metric and the best
    assert len(set(re.findall(r"run c(\d)", svg))) == 8
    assert "lr 3, kind" not in runs_svg(cards[:8]) and len(Drawing(runs_svg(cards[:8])).words("c0")) == 1, "eight have a colour each"


def test_a_run_is_called_by_its_name_in_the_table_the_picture_the_title_and_its_record() -> None:
    cards = [card(values, name) for values, name in (([], "run-007"), ([1.0, 0.5], "run-008"), ([1.0, 0.4], "run-009"))]
    svg, page = runs_svg(cards), runs_html(cards, "x")
    assert "run-008<" in svg and "★ run-009<" in svg and "★ val_loss 0.4 with run-009<" in page
    assert re.findall(r"Toy · (run-00\d)", page) == [card.name for card in cards]
    assert "with lr 2 · Toy 1<" in runs_html(of_rates("1", "2"), "x"), "the best may be out of sight"
    assert [line.split()[0] for line in runs_text(cards).splitlines()[1:4]] == [card.name for card in cards]


def test_one_run_is_one_run() -> None:
    page = runs_html([card([0.5])], "x")
    assert ">1 run ·" in page and "1 runs" not in page and runs_html(of_rates("1", "2"), "x").count("2 runs") == 2


def test_runs_of_two_classes_are_not_ranked_against_each_other() -> None:
    cards = [
        card([value], **{"class": kind}, lr=lr) for kind, lr, value in (("A", "1", 9.0), ("B", "1", 0.4), ("A", "2", 8.0), ("B", "2", 0.2))
    ]
    table = run_table(cards)
    orders = {column.head: column.order for column in table.columns}
    assert best_of(cards) is None and table.bests == [cards[2], cards[3]] and table.columns[1].head == "class"
    assert orders["val_loss"] == [1, 3, 0, 2], "each class is a group, the best of it first"
    assert [line.endswith("★") for line in runs_text(cards).splitlines()[1:5]] == [False, False, True, True]
    assert "★ val_loss 8 with A, lr 2 · Toy 1 · ★ val_loss 0.2 with B, lr 2" in runs_html(cards, "x") and "★ A, lr 2<" in runs_svg(cards)
    assert run_table(cards[1:]).bests == [cards[3]], "one run of a class is the best of none"


def test_functions_that_differ_are_words_within_a_class() -> None:
    codes = (("A", "0"), ("A", "1"), ("B", "2"), ("A", "3"), ("A", "1"))
    cards = [card([0.5], "run", **{"class": kind}, train_step=f"code 00000{code}", loss_of="code abcdef") for kind, code in codes]
    words = [line.split() for line in runs_text(cards).splitlines()[:6]]
    assert words[0][1:3] == ["class", "train_step"]
    assert [" ".join(line[2:-3]).replace(" 0.5000", "") for line in words[1:]] == ["original", "edited", "original", "edited 2", "edited"]
    assert varying(in_words([cards[0], cards[2]])) == ["class"] and "code" not in runs_html(cards, "x") + runs_svg(cards)


def test_runs_of_one_epoch_are_dots_over_the_number_in_which_they_differ() -> None:
    cards = [card([value], lr=lr, seed=str(i)) for i, (lr, value) in enumerate((("0.001", 0.9), ("0.01", 0.2), ("0.1", 0.5)))]
    drawing = picture_of(cards)
    drawing.check()
    places = [float(dot.attrib["cx"]) for dot in drawing.parts("circle") if dot.attrib["class"] == "train"]
    assert len(places) == 3 and places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2), "a log axis"
    (ring,) = [dot for dot in drawing.parts("circle") if dot.attrib["class"] == "best"]
    assert float(ring.attrib["cx"]) == places[1] and drawing.words("strong") == ["val_loss", "lr", "★ lr 0.01 · Toy 1"]
    assert "epoch" not in " ".join(drawing.words()) and 'alt="val_loss of 3 runs by lr"' in runs_html(cards, "x")


def test_a_note_of_two_lines_has_two_lines() -> None:
    cards = [card([0.5]), card([0.7])]
    cards[0].note = "first try\nwith a warm start"
    lines = runs_text(cards).splitlines()
    assert lines[1].endswith("★ first try") and lines[2].strip() == "with a warm start" and lines[2].index("w") > len(lines[3])
    assert re.search(r"white-space:pre-line[^>]*>first try\nwith a warm start<", runs_html(cards, "x"))


def test_runs_without_a_value_are_not_drawn() -> None:
    assert runs_svg([card([]), card([math.nan])]) == ""
    assert runs_svg([card([]), card([0.5])]).count("<circle") == 1  # one epoch is a dot


def test_two_hundred_runs_make_one_small_picture() -> None:
    cards = [card([1 / (i + epoch) for epoch in range(1, 60)], lr=str(i)) for i in range(200)]
    svg, page = runs_svg(cards), runs_html(cards, "many")
    assert svg.count('class="run ') == 200 and len(svg) < 120_000
    assert len(page) < 1_200_000 and page.count("<details") == 200


def test_each_head_sorts_and_what_has_no_value_is_last() -> None:
    cards = [card([0.5], lr="0.1"), card([0.2], lr="1e-3"), card([], lr="–"), card([0.3], lr="10")]
    table = run_table(cards)
    orders = {column.head: column.order for column in table.columns}
    assert orders["run"] == [0, 1, 2, 3] and orders["lr"] == [1, 0, 3, 2] and orders["val_loss"] == [2, 0, 3, 1]
    up = run_table([card([0.5], mode="max"), card([0.7], mode="max")])
    assert up.columns[1].head == "val_loss" and up.columns[1].order == [1, 0]  # the best first


def test_a_line_opens_to_the_record_and_says_how_the_run_ended() -> None:
    cards = [card([0.5], lr="1"), card([0.7], status="failed", lr="2")]
    cards[1].board.reason, cards[1].note, cards[1].tags = "ValueError", "<b>too large</b>", ("wide",)
    page = runs_html(cards, "two")
    assert page.count("<details") == 2 and "✗ failed · ValueError" in page and "wide · &lt;b&gt;too large" in page and "<b>" not in page
    assert "✗ failed · ValueError wide <b>too large" in runs_text(cards)


def test_values_of_a_column_have_as_many_digits_each() -> None:
    cards = [card([value]) for value in (7.86, 7.851, 0.1, 1234.0, 4.2e12, math.inf)] + [card([])]
    assert run_table(cards).columns[1].texts == ["7.860", "7.851", "0.1000", "1234", "4.200e+12", "inf", "–"]


def test_a_picture_that_takes_long_is_sent_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = 0.0, []

    def show(*_: Any, **__: Any) -> None:
        nonlocal now
        now += 0.1
        sent.append(now)

    monkeypatch.setattr(cell_runs.time, "monotonic", lambda: now)
    monkeypatch.setattr(cell_runs, "show_output", show)
    runs = cell_runs.CellRuns(cell="a test")
    runs.cards += [card([0.5], lr="1"), card([0.7], lr="2")]
    for _ in range(100):
        runs.fold()
        now += 0.1
    assert len(sent) == 5, "each takes 0.1 s, so 2 s are between them"


def test_settings_of_strangers_are_shown_as_text() -> None:
    cards = [card([0.5], lr="<script>"), card([0.7], lr="\x1b[31m")]
    assert "<script" not in runs_html(cards, "x") and "\x1b" not in runs_html(cards, "x") + runs_text(cards)
    pictures = re.findall(r"base64,([\w+/=]+)", runs_html(cards, "x"))
    assert pictures and all(b"<script" not in base64.b64decode(found) for found in pictures)


def test_what_has_no_column_is_counted() -> None:
    cards = [card([0.5], **{name: f"{name}{i}" if i & bit else "0" for name, bit in zip("abcd", (1, 2, 4, 8))}) for i in range(16)]
    assert "1 more setting differs" in runs_text(cards)


def test_a_long_number_has_five_digits_and_still_differs() -> None:
    cards = [card([0.5], lr="0.04503599627370499"), card([0.7], lr="0.04503599627370498")]
    assert varying(cards) == ["lr"] and run_table(cards).columns[1].texts == ["0.045036", "0.045036"]
    assert "lr 0.045036" in runs_text(cards) + label_of(cards[0], ["lr"])
