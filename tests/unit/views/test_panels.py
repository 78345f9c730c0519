"""The metrics by epoch: as panels of a record, and as figures of matplotlib."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
from drawn import Drawing
from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import print_figure
from matplotlib.figure import Figure

from nbtrain.errors import ConfigError
from nbtrain.events import Event, Progress
from nbtrain.history.history import History
from nbtrain.views import html, plots
from nbtrain.views.axes import Sweep
from nbtrain.views.curve import LossCurve
from nbtrain.views.panels import also_measured, panels, panels_svg, panels_words
from nbtrain.views.svg import COLOURS, HUES

TWELVE = (
    "train_loss", "val_loss", "val_acc", "val_f1", "val_recall", "val_mcc", "val_kappa", "val_brier", "auroc", "grad_norm", "val_wer", "x",
)  # fmt: skip


def rows_of(n: int, *names: str) -> list[dict[str, Any]]:
    """Rows in which metric number k is k + 2 / epoch."""
    return [{"epoch": epoch, "step": 9 * epoch} | {name: k + 2 / epoch for k, name in enumerate(names)} for epoch in range(1, n + 1)]


def with_values(name: str, values: list[float]) -> list[dict[str, Any]]:
    return [{"epoch": epoch, name: value} for epoch, value in enumerate(values, start=1)]


# -- the panels of a record
def test_monitored_quantity_is_first_and_the_loss_after_it() -> None:
    rows = rows_of(2, "train_acc", "val_acc", "val_f1", "train_loss", "val_loss")
    assert list(panels(rows)) == ["loss", "acc", "f1"] and list(panels(rows, "val_f1")) == ["f1", "loss", "acc"]


def test_six_quantities_have_panels_and_the_others_a_quiet_line() -> None:
    drawing = Drawing(panels_svg(rows_of(30, *TWELVE), monitor="val_f1"))
    drawing.check()
    assert drawing.words("strong title") == ["f1", "loss", "acc", "recall", "mcc", "kappa"]
    assert drawing.words()[-1] == "by epoch · also measured: brier, wer, auroc, grad_norm, x"
    assert also_measured(["loss"]) == ""


def test_best_value_has_a_ring_and_its_number_is_in_the_table_only() -> None:
    rows = rows_of(10, "train_loss", "val_loss")
    drawing = Drawing(panels_svg(rows, rows[3]))
    (ring,) = [part for part in drawing.parts("circle") if part.attrib["class"] == "best"]
    dots = [part for part in drawing.parts("circle") if part.attrib["class"] == "val"]
    assert ring.attrib["cx"] == dots[3].attrib["cx"] and drawing.words()[-1] == "by epoch"


def test_best_value_of_a_thinned_line_stays_and_what_was_before_the_cut_is_faint() -> None:
    rows = rows_of(2000, "train_loss", "val_loss")
    rows[2] |= {"val_loss": 0.5}
    drawing = Drawing(panels_svg(rows, rows[2], cut=(Progress(epoch=500), "continued")))
    drawing.check()
    (ring,) = [part for part in drawing.parts("circle") if part.attrib["class"] == "best"]
    assert (float(ring.attrib["cx"]), float(ring.attrib["cy"])) in drawing.points("val past")
    assert drawing.points("val past")[-1] == drawing.points("val")[0] and len(drawing.points("cut")) == 2
    assert drawing.words()[-1] == "by epoch · continued after epoch 500"


def test_metric_that_is_nan_or_late_has_one_of_the_six_panels() -> None:
    rows = rows_of(9, *TWELVE)
    for row in rows:
        row |= {"val_nan": math.nan} | ({"val_late": 0.5} if row["epoch"] >= 3 else {})
    assert list(panels(rows))[:4] == ["loss", "nan", "late", "acc"]


def test_epochs_of_a_long_run_do_not_overlap() -> None:
    Drawing(panels_svg(rows_of(2000, "val_loss", "val_acc", "val_f1"))).check()


def test_lines_are_named_below_the_titles() -> None:
    drawing = Drawing(panels_svg(rows_of(10, "train_loss", "val_loss", "auroc")))
    assert [drawing.words(kind) for kind in ("train", "val")] == [["train"], ["val"]]


def test_marks_are_numbered_in_every_panel() -> None:
    marks = [(Progress(epoch=0, batch=1, n_batches=2, phase="train"), "lr"), (Progress(epoch=6), "lr"), (Progress(epoch=10), "saved")]
    drawing = Drawing(panels_svg(rows_of(10, "val_loss", "val_acc"), marks=marks))
    drawing.check()
    assert [drawing.words().count(number) for number in ("1", "2", "3")] == [2, 2, 2]


def test_metric_that_becomes_nan_has_a_cross_and_its_last_value_is_marked() -> None:
    drawing = Drawing(panels_svg(with_values("val_loss", [1.0, 0.5, math.nan, math.inf])))
    assert len(drawing.points("bad")) == 1 and drawing.words("bad") == ["val ∞"]


def test_metric_without_a_finite_value_says_so_and_a_constant_one_is_a_line() -> None:
    assert "no finite value" in Drawing(panels_svg(with_values("val_loss", [math.nan] * 6))).words()
    assert "no finite value" not in Drawing(panels_svg(with_values("val_loss", [0.1] * 6))).words()
    assert len({y for _, y in Drawing(panels_svg(with_values("val_loss", [0.1] * 6))).points("val")}) == 1


def test_long_runs_stay_small() -> None:
    assert len(panels_svg(rows_of(5000, *TWELVE))) < 20_000


def test_no_epoch_is_no_picture() -> None:
    assert panels_svg([]) == "" and panels_svg([{"step": 3, "test_loss": 1.0}]) == ""


def test_panels_in_words() -> None:
    assert panels_words(rows_of(2, "train_loss", "val_loss", "auroc")) == "By epoch: loss: train 2 to 1, val 3 to 2; auroc: auroc 4 to 3"


def test_random_metrics_are_drawn_inside() -> None:
    draw = random.Random(3)
    odd = [math.nan, math.inf, -math.inf, 1e300, -1.7e308, 5e-324, 0.0, -1.0, 1, True]
    names = [*TWELVE, "train_<b>&\x00", "val_" + "long_name_" * 9]
    for _ in range(300):
        chosen, n = draw.sample(names, draw.randrange(1, 14)), draw.choice([1, 2, 5, 60])
        share = draw.choice([0, 0.1, 1])
        rows = [
            {"epoch": e} | {k: draw.choice(odd) if draw.random() < share else 10 ** draw.gauss(0, 4) for k in chosen if draw.random() < 0.9}
            for e in range(1, n + 1)
        ]
        marks = [(Progress(epoch=draw.randrange(n + 3), batch=1, n_batches=2), "saved") for _ in range(draw.randrange(5))]
        svg = panels_svg(rows, draw.choice([None, *rows]), marks, draw.choice(chosen))
        if svg:
            Drawing(svg).check()
            assert panels_words(rows)


# -- figures
def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_figure_has_six_panels_at_most_and_names_the_others() -> None:
    figure = plots.curves(rows_of(9, *TWELVE), monitor="val_f1")
    assert [axes.get_title("left") for axes in figure.axes] == ["f1", "loss", "acc", "recall", "mcc", "kappa"]
    assert figure.get_supxlabel() == "also measured: brier, wer, auroc, grad\\_norm, x".replace("\\_", "_")


@pytest.mark.parametrize(
    ("values", "scale", "labels"),
    [([1.0, 0.1, 0.001], "log", ["0.001", "0.01", "0.1", "1"]), ([0.1] * 3, "linear", ["0.1"]), ([math.nan] * 3, "linear", [])],
)
def test_axis_of_a_figure_is_that_of_the_record(values: list[float], scale: str, labels: list[str]) -> None:
    (axes,) = plots.curves(with_values("val_loss", values)).axes
    assert axes.get_yscale() == scale and [label.get_text() for label in axes.get_yticklabels()] == labels
    assert texts(axes) == (["val"] if labels else ["no finite value"])


def history_of(n_epochs: int) -> History:
    history, at = History(), {"phase": "train", "n_epochs": n_epochs}
    for epoch in range(n_epochs):
        losses = [1 / (40 * epoch + i + 1) for i in range(40)]
        n = 40 * epoch + 40
        history.update(Event("steps", Progress(epoch=epoch, step=n, processed=n, **at), 0.0, {"n": 40, "values": {"train_loss": losses}}))
        row = {"epoch": epoch + 1, "step": 40 * epoch + 40, "train_loss": losses[-1], "val_loss": 0.5, "val_acc": 0.1}
        history.update(Event("epoch", Progress(epoch=epoch + 1), 0.0, {"row": row}))
    return history


def test_history_plots_the_loss_by_step_where_there_are_few_epochs() -> None:
    found = [[(axes.get_title("left"), axes.get_xlabel()) for axes in history_of(n).plot().axes] for n in (1, 4, 5)]
    assert found == [[("loss", "step")], [("loss", "step"), ("acc", "epoch")], [("loss", "epoch"), ("acc", "epoch")]]
    lines = history_of(2).plot().axes[0].lines
    assert [len(line.get_xdata()) for line in lines[:3]] == [80, 80, 2]


def test_history_without_steps_or_epochs_is_plotted() -> None:
    assert history_of(0).plot().axes == [] and len(plots.png(History().plot())) > 100
    assert plots.curves(rows_of(2, "val_loss"), curve=LossCurve()).axes[0].get_xlabel() == "epoch"


def test_changes_are_numbered_in_a_figure() -> None:
    history = history_of(2)
    history.marks += [(Progress(step=10, processed=10), "lr"), (Progress(step=60, processed=60, epoch=1), "train_step changed")]
    axes = history.plot().axes[0]
    assert [text for text in texts(axes) if text.isdecimal()] == ["1", "2"] and len(axes.patches) == 0


def test_a_long_name_leaves_room_for_the_curves() -> None:
    rows = rows_of(3, "train_loss", "train_acc")
    figure = plots.compared([plots.ComparedRun(label, rows) for label in ("a", "b" + 200 * " lr 0.1 → 0.2")])
    plots.png(figure)  # matplotlib warns where nothing is left of the panels
    width = figure.get_figwidth() * figure.dpi
    assert all(axes.get_window_extent().width > 0.2 * width for axes in figure.axes)


def test_compared_runs_have_the_panels_of_one_and_names_at_the_ends_of_their_lines() -> None:
    runs = [plots.ComparedRun("a", rows_of(9, *TWELVE)), plots.ComparedRun("b", rows_of(3, "train_loss"), is_best=True)]
    figure = plots.compared(runs)
    assert len(figure.axes) == 6 and all(axes.get_legend() is None for axes in figure.axes)
    assert texts(figure.axes[0]) == ["★ b", "a"] and [text.get_color() for text in figure.axes[0].texts] == [*HUES["light"][1::-1]]
    assert figure.get_supxlabel().startswith("thin: train · also measured: ")


def test_figure_of_a_history_has_the_colours_of_its_record_and_a_ring_at_the_best() -> None:
    rows = rows_of(9, "train_loss", "val_loss")
    (axes,) = plots.curves(rows, rows[3]).axes
    named = {text.get_text(): text.get_color() for text in axes.texts}
    assert named == {name: COLOURS["light"][name] for name in ("train", "val")} and axes.get_legend() is None
    assert [line.get_color() for line in axes.lines[:2]] == [COLOURS["light"]["train"], COLOURS["light"]["val"]]
    assert [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_markersize() == 8] == [(4, rows[3]["val_loss"])]


def test_a_metric_that_does_not_change_gives_way_and_any_can_be_chosen() -> None:
    rows = [row | {"val_still": 1.0} for row in rows_of(9, "val_loss", "train_acc", "val_acc")]
    assert list(panels(rows)) == ["loss", "acc", "still"] and list(panels([{"epoch": 1, "a": 1.0, "b": 2.0}])) == ["a", "b"]
    assert (
        panels(rows, metrics=["still", "val_acc"])
        == {"still": ["val_still"], "acc": ["val_acc"]}
        == panels(rows, metrics=("val_acc", "still"))
    )
    with pytest.raises(ConfigError, match="'f1' was not measured(?s:.*)Give some of acc, loss, still"):
        plots.curves(rows, metrics=["f1"])
    with pytest.raises(ConfigError, match="'f1' was not measured(?s:.*)No epoch is finished yet"):
        History().plot(["f1"])
    many = rows_of(9, *TWELVE)
    assert len(plots.curves(many, metrics=list(panels(many))).axes) == len(panels(many)) > 6


def test_runs_of_one_epoch_are_drawn_over_the_number_in_which_they_differ() -> None:
    results = [{"epoch": 1, "train_loss": 2 * loss, "val_loss": loss} for loss in (0.5, 0.2, 0.9)]
    rates = [0.001, 0.01, 0.1]
    runs = [plots.ComparedRun(f"lr {lr}", [row], row, lr == 0.01) for lr, row in zip(rates, results)]
    (axes,) = plots.compared(runs, sweep=Sweep("lr", rates)).axes
    assert axes.get_xlabel() == "lr" and axes.get_xscale() == "log"
    train, val, ring = (list(map(tuple, line.get_xydata())) for line in axes.lines)
    assert val == [(0.001, 0.5), (0.01, 0.2), (0.1, 0.9)] and len(train) == 3 and ring == [(0.01, 0.2)]
    assert "★ lr 0.01" in texts(axes)
    (axes,) = plots.compared(runs, sweep=Sweep("depth", [0.0, 1.0, 2.0])).axes
    assert axes.get_xscale() == "linear"


def test_longer_runs_have_a_panel_over_the_number_before_their_curves() -> None:
    runs = [plots.ComparedRun(f"lr {i}", rows := rows_of(5, "val_loss", "val_acc"), rows[-1], i == 1) for i in range(3)]
    figure = plots.compared(runs, sweep=Sweep("lr", [0.0, 1.0, 2.0]))
    assert [(axes.get_title("left"), axes.get_xlabel()) for axes in figure.axes] == [
        ("best val_loss", "lr"), ("loss", "epoch"), ("acc", "epoch"),
    ]  # fmt: skip
    assert len(plots.compared(runs[:2], sweep=Sweep("lr", [0.0, 1.0])).axes) == 2, "two dots are no curve"


def test_figure_is_shown_at_half_its_dots() -> None:
    figure = plots.curves(rows_of(9, "val_loss"))
    data, metadata = DisplayFormatter().format(figure, include={"image/png"})
    width, height = (int.from_bytes(data["image/png"][i : i + 4], "big") for i in (16, 20))
    assert metadata["image/png"] == {"width": width // 2, "height": height // 2} == {"width": 432, "height": 200}
    assert re.search(r'width="432" height="200"', html.image_html(data["image/png"], "curves"))


def test_figure_has_its_nominal_size_where_pyplot_draws_inline() -> None:
    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type(Figure, print_figure)  # what IPython does then
    data, _ = formatter.format(plots.curves(rows_of(9, "val_loss")), include={"image/png"})
    width, height = (int.from_bytes(data["image/png"][i : i + 4], "big") for i in (16, 20))
    assert abs(width - 432) < 15 and abs(height - 200) < 15  # cut to what is drawn
