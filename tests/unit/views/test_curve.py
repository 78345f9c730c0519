"""The loss by step: its points, its axes, and the drawing, which is looked at as XML."""

from __future__ import annotations

import math
import random
import re
from base64 import b64decode

import pytest
from drawn import Drawing

from nbtrain.events import Progress
from nbtrain.formatting import digits_of
from nbtrain.views.axes import axis_of, count_ticks, short, short_count
from nbtrain.views.curve import LossCurve, curve_svg, curve_words, mark_numbers, step_axis
from nbtrain.views.svg import COLOURS, picture


def curve_of(losses: list[float], validations: dict[int, float] | None = None, block: int = 7) -> LossCurve:
    curve = LossCurve()
    for i in range(0, len(losses), block):
        part = losses[i : i + block]
        curve.add_block(range(i + 1, i + len(part) + 1), part)
    for step, value in (validations or {}).items():
        curve.add_validation(step, value)
    return curve


def falling(n: int, last: float = 0.1) -> list[float]:
    """Losses from 2 down to `last`, each 30% up or down from the curve."""
    return [2 * (last / 2) ** (i / n) * (1.3 if i * i % 7 < 3 else 0.7) for i in range(n)]


def marked(**steps: int) -> list[tuple[Progress, str]]:
    return [(Progress(step=step, processed=step), text) for text, step in steps.items()]


# -- the points
@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("n", [1, 399, 400, 401, 12_345])
def test_curve_keeps_few_points_and_the_newest(n: int, block: int) -> None:
    curve = curve_of(falling(n), block=block)
    assert len(curve.points) <= 400 and (n < 400 or len(curve.points) >= 200) and len(curve.smoothed) == len(curve.points)
    assert curve.points[-1].step == curve.last_step == n and sum(p.n_seen for p in curve.points) == n


def test_points_are_the_same_in_blocks_of_any_size() -> None:
    first, *others = ([(p.step, round(p.mean, 9)) for p in curve_of(falling(3000), block=block).points] for block in (1, 64, 3000))
    assert all(other == first for other in others)


def test_a_point_is_the_mean_of_its_steps() -> None:
    curve = LossCurve(max_points=2)
    curve.add_block([1, 2, 3, 4, 5], [1.0, 3.0, 5.0, 7.0, math.nan])
    assert [(p.step, p.mean, p.bad_step) for p in curve.points] == [(4, 4.0, None), (5, pytest.approx(math.nan, nan_ok=True), 5)]


def test_a_step_that_comes_again_replaces_what_came_after_it() -> None:
    curve = curve_of([1.0, 2.0, 3.0], {2: 0.5, 3: 0.4}, block=1)
    curve.begin(Progress(step=1, processed=1))
    curve.add_block([2], [9.0])
    curve.add_validation(2, 0.6)
    assert [(p.step, p.mean) for p in curve.points] == [(1, 1.0), (2, 9.0)] and curve.validations == [(2, 0.6)]


def test_validations_are_bounded_and_the_newest_stays() -> None:
    curve = curve_of([], dict.fromkeys(range(5000), 1.0))
    assert len(curve.validations) <= 400 and curve.validations[-1] == (4999, 1.0)


@pytest.mark.parametrize("n", [401, 5_000, 30_001])
def test_validations_and_epochs_are_kept_from_the_whole_run(n: int) -> None:
    curve = LossCurve()
    for epoch in range(1, n + 1):
        curve.add_row({"epoch": epoch, "step": 2 * epoch, "val_loss": 1 / epoch}, is_epoch=True)
    for places in (curve.validations, curve.epochs):
        steps = [step for step, _ in places]
        assert 100 <= len(steps) <= 400 and steps[0] == 2 and steps[-1] == 2 * n
        assert max(late - early for early, late in zip(steps, steps[1:])) <= 2 * n / 50


def test_the_newest_loss_is_a_mean_of_the_last_ones_and_not_of_those_before_a_nan() -> None:
    curve = curve_of([1.0])
    assert curve.last == 1.0
    curve.add_block([2, 3], [1.0, math.nan])
    assert math.isnan(curve.last or 0)
    curve.add_block([4], [3.0])
    assert curve.last == pytest.approx(3.0)
    curve.add_block([5], [math.inf])
    assert curve.last == math.inf and curve_words(curve).endswith("1 to ∞ at step 5")
    assert "∞ from step 5" in curve_svg(curve)


# -- axes
@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.12, 2.3], ("0.5", "1.0", "1.5", "2.0")),
        ([0.0, 1.0], ("0.00", "0.25", "0.50", "0.75", "1.00")),
        ([-3.0, 5.0], ("-2", "0", "2", "4")),
        ([100.0, 101.0], ("100.00", "100.25", "100.50", "100.75", "101.00")),
        ([0.004, 2.3], ("0.01", "0.1", "1")),
        ([0.02, 2.3], ("0.03", "0.1", "0.3", "1")),
        ([1e-9, 1.0], ("1e-9", "1e-7", "1e-5", "0.001", "0.1")),
        ([0.5, 0.5], ("0.5",)),
        ([0.5, 0.5 + 1e-9], ("0.5",)),
        ([0.0], ("0",)),
        ([2e-6, 3e-6], ("2e-6", "2.25e-6", "2.5e-6", "2.75e-6", "3e-6")),
    ],
)
def test_ticks_are_round(values: list[float], labels: tuple[str, ...]) -> None:
    axis = axis_of(values)
    assert axis is not None and axis.labels == labels


def test_every_range_has_three_to_five_ticks_that_differ() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        low = draw.choice([0.0, draw.uniform(-1, 1), 10 ** draw.uniform(-90, 90)])
        axis = axis_of([low, low + 10 ** draw.uniform(-5, 5) * max(abs(low), 1e-90)])
        assert axis is not None and 3 <= len(axis.ticks) <= 5 and len(set(axis.labels)) == len(axis.ticks), axis
        assert all(0 <= axis.share(tick) <= 1 for tick in axis.ticks)


def test_only_a_positive_range_over_fifty_is_logarithmic() -> None:
    ranges = [([1.0, 51.0], True), ([1.0, 50.0], False), ([0.0, 51.0], False), ([-1.0, 51.0], False)]
    assert [axis.is_log for values, _ in ranges if (axis := axis_of(values))] == [is_log for _, is_log in ranges]


def test_what_is_not_finite_has_no_axis() -> None:
    assert axis_of([math.nan, math.inf, -math.inf, 1e300]) is None


def test_labels_are_short() -> None:
    close = [0.6931471, 0.6931464, 0.6931459, 0.6931457]
    assert [digits_of(values) for values in ([0.5, 0.4], close, [0.5, 0.5], [math.nan])] == [4, 7, 4, 4]
    assert short(0.6931471, 6) == "0.693147"
    assert [short(value) for value in (0.123456, 1.23456e-5, 2.0, math.nan, -math.inf)] == ["0.1235", "1.23e-5", "2", "NaN", "-∞"]
    assert [short_count(n) for n in (500, 10_000, 99_999, 250_000, 1_500_000)] == ["500", "10,000", "99,999", "250k", "1.5M"]
    assert count_ticks(0, 10) == [0, 2, 4, 6, 8, 10] and count_ticks(3, 3) == [3]


# -- the drawing
def test_drawing_of_one_epoch_shows_steps_up_to_the_planned_end() -> None:
    curve = curve_of(falling(4000), {4000: 0.2})
    curve.begin(Progress(step=4000))
    drawing = Drawing(curve_svg(curve, end_step=10_000, epochs=1))
    drawing.check()
    assert drawing.words() == [
        "0.5", "1.0", "1.5", "2.0", "0", "2,000", "4,000", "6,000", "8,000", "10,000", "step", "train_loss", "val_loss",
    ]  # fmt: skip
    left, right = drawing.points("base")[0][0], drawing.points("base")[1][0]
    assert drawing.points("train")[-1][0] == pytest.approx(left + 0.4 * (right - left), abs=0.1)


def test_a_few_epochs_have_names_below_their_steps_and_many_are_the_unit() -> None:
    curve = LossCurve()
    curve.begin(Progress())
    curve.add_block(range(1, 301), falling(300))
    curve.add_row({"epoch": 1, "step": 200, "val_loss": 0.4}, is_epoch=True)
    few, many = Drawing(curve_svg(curve, end_step=600, epochs=3)), Drawing(curve_svg(curve, end_step=2000, epochs=10))
    few.check(), many.check()
    assert [word for word in few.words() if "epoch" in word] == ["epoch 1", "epoch 2", "epoch 3"] and "step" in few.words()
    assert [t.text for t in many.texts if t.baseline > 170] == ["0", "2", "4", "6", "8", "10", "epoch"]
    steps = {text.text: (text.left + text.right) / 2 for text in few.texts}
    assert steps["epoch 2"] == pytest.approx((steps["200"] + steps["400"]) / 2, abs=0.2)


def test_a_run_that_goes_on_begins_where_it_goes_on() -> None:
    curve = LossCurve()
    curve.begin(Progress(step=1000, processed=1000, epoch=5))
    curve.add_block(range(1001, 1101), falling(100))
    drawing = Drawing(curve_svg(curve, end_step=3000, epochs=15))
    drawing.check()
    assert [t.text for t in drawing.texts if t.baseline > 170] == ["6", "8", "10", "12", "14", "epoch"]
    assert drawing.points("train")[0][0] == pytest.approx(drawing.points("base")[0][0], abs=0.5)


def continued(n_past: int, n: int) -> LossCurve:
    """A run of `n` steps that goes on after `n_past` steps."""
    curve = curve_of(falling(n_past), {n_past // 2: 0.9, n_past: 0.5})
    curve.begin(Progress(step=n_past, processed=n_past))
    curve.go_on((Progress(step=n_past, processed=n_past), "continued"))
    curve.add_block(range(n_past + 1, n_past + n + 1), falling(n))
    curve.add_validation(n_past + n, 0.4)
    return curve


WORDS = r"Training loss by step, smoothed: 2.\d+ to 0.\d+ at step 1000; val_loss 0.9 to 0.4; continued after step 400"


def test_past_of_a_run_is_faint_up_to_the_cut_and_its_curve_does_not_begin_in_the_air() -> None:
    svg = curve_svg(continued(400, 600), end_step=1200, best=[(400, 0.5)])
    drawing = Drawing(svg)
    drawing.check()
    (cut, _), left, right = drawing.points("cut"), *(x for x, _ in drawing.points("base"))
    assert cut[0] == pytest.approx(left + (right - left) / 3, abs=0.1) and "continued" in drawing.words()
    for line in ("train", "val thin"):
        first = drawing.points(line)[0]
        assert first == drawing.points(f"{line} past")[-1] and first[0] == pytest.approx(cut[0], abs=0.1)
    assert "path.past,circle.past{opacity:.45}" in svg and re.fullmatch(WORDS, curve_words(continued(400, 600)))
    (ring,) = [part for part in drawing.parts("circle") if part.attrib["class"] == "best"]
    assert float(ring.attrib["cx"]) == pytest.approx(cut[0], abs=0.1)


def test_newest_run_has_a_fifth_of_the_axis_and_its_own_points_after_a_long_past() -> None:
    curve = continued(100_000, 100)
    drawing = Drawing(curve_svg(curve, end_step=100_100))
    drawing.check()
    left, right = (x for x, _ in drawing.points("base"))
    assert drawing.points("cut")[0][0] == pytest.approx(right - (right - left) / 5, abs=0.1)
    assert len(curve.points) == 100 and len(curve.past) <= 200
    curve.past[0].mean, far = 1e6, Drawing(curve_svg(curve, end_step=100_100))
    assert far.words() == drawing.words()  # a loss that is not on the axis does not stretch it


@pytest.mark.parametrize("paused", range(5))
def test_axis_may_begin_where_an_epoch_of_the_past_ended(paused: int) -> None:
    n = 25 * 5 + paused  # steps; an epoch has five, and the axis of the next run begins 20 before it
    curve = curve_of(falling(n), {})
    for epoch in range(1, 26):
        curve.add_row({"step": 5 * epoch, "epoch": epoch, "train_loss": 0.5}, is_epoch=True)
    curve.begin(Progress(epoch=25, n_epochs=26, step=n))
    curve.go_on((Progress(step=n), "continued"))
    axis = step_axis(curve, n + 5, 26, [])
    assert axis.start == n - 20 and all(math.isfinite(axis.step_of(axis.epochs[0][1] + i / 7)) for i in range(8))


def test_best_validation_is_in_a_thinned_curve() -> None:
    curve = curve_of([], {step: 1.0 - (step == 3) / 2 for step in range(1, 2001)})
    assert (3, 0.5) not in curve.validations
    drawing = Drawing(curve_svg(curve, best=[(3, 0.5)]))
    (ring,) = [part for part in drawing.parts("circle") if part.attrib["class"] == "best"]
    assert (float(ring.attrib["cx"]), float(ring.attrib["cy"])) in drawing.points("val thin")


def test_marks_are_numbered_and_those_that_would_overlap_share_a_sign() -> None:
    curve = curve_of(falling(1000))
    drawing = Drawing(curve_svg(curve, end_step=1000, marks=marked(a=100, b=104, c=500, d=999, e=1000, later=5000)))
    drawing.check()
    assert [text.text for text in drawing.texts if text.baseline < 18] == ["1–2", "3", "4–5"]
    assert len(drawing.points("mark")) == 2 * 5  # a line each, but none for the one outside


def test_lines_of_marks_have_the_numbers_of_the_picture() -> None:
    assert mark_numbers(range(3)) == ["①", "②", "③"] and mark_numbers(range(51))[-2:] == ["㊿", "(51)"]


def test_loss_that_becomes_nan_ends_in_a_cross_and_says_since_when() -> None:
    drawing = Drawing(curve_svg(curve_of(falling(500) + [math.nan] * 500), end_step=1000))
    drawing.check()
    assert drawing.words("bad") == ["NaN from step 501"] and len(drawing.points("bad")) == 1
    assert max(x for x, _ in drawing.points("train")) < drawing.points("bad")[0][0] + 4


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([math.inf] * 500, "∞ from step 501"),
        ([math.inf] * 9 + [math.nan] * 491, "∞/NaN: step 501"),
        ([math.inf] * 9 + [0.1] * 91 + [math.nan] * 400, "NaN from step 601"),
    ],
)
def test_what_the_loss_has_become_is_said(losses: list[float], words: str) -> None:
    drawing = Drawing(curve_svg(curve_of(falling(500) + losses), end_step=1000))
    drawing.check()
    assert drawing.words("bad") == [words]


def test_a_few_losses_that_are_not_finite_are_crosses_on_the_line() -> None:
    losses = [math.inf if 100 <= i < 130 or i == 200 else loss for i, loss in enumerate(falling(300))]
    drawing = Drawing(curve_svg(curve_of(losses)))
    drawing.check()
    assert len(drawing.points("bad")) == 2 and drawing.words("bad") == []


def test_no_finite_value_is_said() -> None:
    assert "no finite value" in Drawing(curve_svg(curve_of([math.nan] * 9))).words()


def test_constant_loss_is_a_line_in_the_middle_with_one_tick() -> None:
    drawing = Drawing(curve_svg(curve_of([0.5] * 100)))
    top, bottom = 8, drawing.points("base")[0][1]
    assert drawing.words()[:1] == ["0.5"] and {y for _, y in drawing.points("train")} == {round((top + bottom) / 2, 1)}


def test_loss_over_four_decades_has_a_logarithmic_axis() -> None:
    drawing = Drawing(curve_svg(curve_of([10 ** (1 - 4 * i / 1000) for i in range(1000)])))
    drawing.check()
    assert [text for text in drawing.words() if text in ("log", "0.01", "0.1", "1", "10")] == ["0.01", "0.1", "1", "log"]
    line = drawing.points("train")
    steps = [b[1] - a[1] for a, b in zip(line[20:-20], line[21:-20])]
    assert max(steps) - min(steps) <= 0.25  # a straight one


def test_one_point_is_a_dot_and_two_are_a_line() -> None:
    one, two = (Drawing(curve_svg(curve_of(losses), end_step=100)) for losses in ([2.3], [2.3, 2.1]))
    one.check(), two.check()
    assert len(one.parts("circle")) == 1 and len(two.points("train")) == 2 and "train_loss" in two.words()


def test_nothing_measured_is_no_drawing() -> None:
    assert curve_svg(LossCurve()) == ""


def test_ghost_is_dashed_and_has_its_label() -> None:
    ghost = ("run 1", [(step, 1.5 - step / 1000) for step in range(0, 1001, 10)])
    svg = curve_svg(curve_of(falling(300)), end_step=1000, ghost=ghost)
    drawing = Drawing(svg)
    drawing.check()
    assert drawing.words("ghost") == ["run 1"] and len(drawing.points("ghost")) == 101
    assert "path.ghost{stroke-width:1.4;stroke-dasharray:5 4}" in svg


def test_equal_runs_give_equal_bytes_and_a_small_picture() -> None:
    svgs = {curve_svg(curve_of(falling(10_000), {i * 200: 0.1 for i in range(50)}), end_step=10_000, marks=marked(a=9)) for _ in range(2)}
    assert len(svgs) == 1 and len(svgs.pop()) < 20_000


def test_random_losses_are_drawn_inside() -> None:
    draw = random.Random(7)
    odd = [math.nan, math.inf, -math.inf, 1e300, -1.7e308, 1.7e308, 5e-324, 0.0, -1.0, 1e-200, 1e99]
    for _ in range(300):
        scale, share = 10 ** draw.uniform(-12, 12), draw.choice([0, 0, 0.05, 0.5, 1])
        n = draw.choice([1, 2, 3, 50, 900])
        losses = [draw.choice(odd) if draw.random() < share else draw.lognormvariate(0, 1) * scale for _ in range(n)]
        curve = curve_of(losses, {draw.randrange(1, n + 2): draw.choice([*odd, scale]) for _ in range(3)}, block=draw.randrange(1, 99))
        marks = [(Progress(step=draw.randrange(2 * n)), draw.choice(["saved", "train_step changed"])) for _ in range(draw.randrange(9))]
        ghost = ("run 1", [(draw.randrange(n), draw.choice([*odd, scale])) for _ in range(draw.randrange(4))])
        if draw.random() < 0.4:
            curve.go_on((Progress(step=n), "continued"))
            curve.add_block(range(n + 1, 2 * n + 1), losses)
        end = draw.choice([None, n, 2 * n, 5 * n])
        svg = curve_svg(curve, end_step=end, epochs=draw.choice([None, 1, 3, 20]), marks=marks, ghost=ghost)
        assert not re.search(r"nan|inf\b", re.sub(r">[^<]*<", "><", svg)) and curve_words(curve)
        Drawing(svg).check()


# -- the image
def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", COLOURS)
def test_colours_stand_out_from_the_page(theme: str) -> None:
    colours = COLOURS[theme]
    page = {"light": "#ffffff", "dark": "#111111"}[theme]
    assert colours["page"] == page
    texts = ("text", "strong", "train", "val", "bad", "ghost")  # the lines have the colours of their labels
    assert all(_contrast(colours[name], page) >= 4.5 for name in texts)


def test_picture_is_an_image_with_words_and_its_size() -> None:
    curve = curve_of([2.0, 1.0], {2: 1.5})
    svg = curve_svg(curve)
    image = picture(svg, curve_words(curve) + ' "<')
    head, source = image.split("\n")
    words = "Training loss by step, smoothed: 2 to 1 at step 2; val_loss 1.5 to 1.5"
    opening = f'<img class="nbtrain-svg" width="640" height="180" style="max-width:100%;height:auto" alt="{words} &quot;&lt;"'
    assert head.rpartition("</style>")[2] == opening
    assert source.startswith('src="data:image/svg+xml;base64,') and b64decode(source.split(",")[1][:-2]).decode() == svg


def test_drawing_follows_the_theme_of_its_reader() -> None:
    style = Drawing(curve_svg(curve_of([2.0, 1.0]))).parts("style")[0].text
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    assert COLOURS["light"]["train"] in light and COLOURS["dark"]["train"] in dark and COLOURS["light"]["train"] not in dark
