"""The benchmarks without a stopwatch: contenders do the same work, and the tables judge given figures rightly."""

from __future__ import annotations

import contextlib
import io
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import contenders
import counts
import epochs
import features
import loggers
import pytest
from measure import Duel, Outcome, chosen, equal_weights, same_work
from samples import some
from steps import OURS, PEERS, VARIANTS, judged, shown
from tables import Claim, Row, Table, drawn, duel_row, less_than
from workload import Clock, Job, Sample

INSTALLED = {"plain loop + tqdm", "Lightning", "Fabric"}
STEPS = [*VARIANTS, *chosen(PEERS, INSTALLED)]


def outcome(duel: Duel, *step_us: tuple[float, float]) -> Outcome:
    return Outcome(duel, "equal", tuple((Sample(base, base + 1, 1, 2), Sample(tool, tool + 9, 1, 3)) for base, tool in step_us))


def quiet_same_work(duel: Duel, folder: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's about workers and intervals
        return same_work(duel, Job(folder, n_epochs=duel.n_epochs))


@pytest.mark.parametrize("duel", STEPS, ids=lambda duel: duel.name)
def test_contender_ends_with_the_weights_of_the_plain_loop(duel: Duel, tmp_path: Path) -> None:
    assert quiet_same_work(duel, tmp_path) == "equal"


@pytest.mark.parametrize("duel", some(features.DUELS, 3), ids=lambda duel: duel.name)
def test_feature_does_the_work_of_its_plain_loop(duel: Duel, tmp_path: Path) -> None:
    assert quiet_same_work(replace(duel, n_epochs=min(duel.n_epochs, 2)), tmp_path) == "equal"


@pytest.mark.parametrize("name", some(["nothing", "a training log in CSV", "the system's view", "a user's self.log"], 4))
def test_what_is_watched_is_counted_with_its_threads(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own, others, calls = loggers.measured(name, 1500, 100)
    assert own > calls and (calls > 0) == (name != "nothing")
    assert others > 0.2 or name != "a training log in CSV"  # without threads it is what two clocks differ by, which a busy machine decides


def test_loggers_are_bounded_in_time_and_the_system_by_its_share() -> None:
    assert loggers.row("Neptune", [(100, 15, 6), (100, 12, 4), (100, 9, 5)]).all_claims[0].met
    assert not loggers.row("Neptune", [(100, 15, 6)]).all_claims[0].met
    assert loggers.row("the system's view", [(600, 0, 5.9)]).all_claims[0].met
    assert not loggers.row("the system's view", [(600, 0, 6.1)]).all_claims[0].met


def test_work_of_a_feature_changes_the_weights(tmp_path: Path) -> None:
    job = Job(tmp_path, n_epochs=2).short()
    weights = contenders.plain(job)
    for name in ("clipping by norm", "accumulation of 4", "a schedule by updates"):
        work = replace(features.WORKS[name], clip=0.1) if name.startswith("clip") else features.WORKS[name]
        assert not equal_weights(weights, contenders.plain(job, work)), name


def test_other_work_is_refused(tmp_path: Path) -> None:
    def two_epochs(job: Job) -> Any:
        return contenders.plain(replace(job, n_epochs=2))

    with pytest.raises(AssertionError, match="^twice ends with other weights than its base"):
        same_work(Duel("twice", two_epochs), Job(tmp_path))
    assert same_work(Duel("twice", two_epochs, own_way="trains twice"), Job(tmp_path)) == "trains twice"


def test_patience_ends_after_three_epochs_that_are_no_better() -> None:
    stop = features.Patience()
    assert [stop(None, None, loss) for loss in (3.0, 2.0, 2.5, 2.0, 2.1)] == [False, False, False, False, True]


def test_clock_leaves_out_the_first_steps_and_takes_the_20th_percentile() -> None:
    clock = Clock()
    clock.reads_s = [0.0, 9.0, 18.0, *(18.0 + 1e-4 * total for total in (5, 9, 12, 14, 15))]  # windows of 5, 4, 3, 2, 1 µs a step
    assert clock.sample() == Sample(pytest.approx(2.0), pytest.approx(3.0))


def test_figures_are_medians_of_what_each_round_gave() -> None:
    row = duel_row(outcome(Duel("tool", contenders.plain), (100, 150), (200, 240), (100, 190)))
    assert (row.cells, row.bar) == (("tool", "190", "1.50 ×", "+50 µs", "1.50 ×"), 1.5)
    whole = duel_row(outcome(Duel("tool", contenders.plain, steady=False), (100, 150)))
    assert whole.cells[1:4] == ("159", "1.57 ×", "+58 µs")


def test_row_without_rounds_misses_its_bounds() -> None:
    row = duel_row(Outcome(replace(OURS, name="ours"), error="ImportError: no"))
    assert row.cells == ("ours", "ImportError: no") and not any(claim.met for claim in row.claims)
    assert str(Table("T", ("a", "b", "c"), (row,))).splitlines()[-3:] == [
        "",
        "- ours: **not measured (bound 1.10: missed)**",
        "- ours: **not measured (bound 40: missed)**",
    ]


def test_claim_shows_its_figure_and_its_bound_with_as_many_digits() -> None:
    texts = [str(Claim("{:.2f} ×", value, 1.1)) for value in (1.0, 1.123, math.nan)]
    assert texts == ["1.00 × (bound 1.10)", "**1.12 × (bound 1.10: missed)**", "**not measured (bound 1.10: missed)**"]
    assert str(Claim("{:+.1f} µs", 3.25, 40)) == "+3.2 µs (bound 40)"
    assert str(Claim("{:.0f} times", 36.4, 35, at_least=True)) == "36 times (at least 35)"
    assert not Claim("{}", 34, 35, at_least=True).met


def test_bars_are_as_long_as_their_values() -> None:
    assert [drawn(value, 8.0) for value in (8.0, 4.0, 0.25, 0.0, -1.0)] == ["█" * 20, "█" * 10, "▋", "▏", "▏"]
    rows = Row(("x", "2"), bar=2.0), Row(("y", "1"), bar=1.0), Row(("z", ""))
    bars = [line.split(" | ")[1] for line in str(Table("T", ("what", "n"), rows)).splitlines()[-3:]]
    assert bars == ["█" * 20, "█" * 10, ""]


def test_ours_is_held_against_lightning_and_the_nearest_peer_that_was_there() -> None:
    lightning, fabric, keras = chosen(PEERS, {"Lightning", "Fabric", "Keras 3 on torch"})
    rows = judged(
        [outcome(OURS, (400, 430)), outcome(lightning, (400, 1900)), outcome(fabric, (400, 480)), Outcome(keras, error="no keras")]
    )
    assert list(map(str, rows[0].all_claims)) == [
        "1.07 × (bound 1.10)",
        "+30 µs (bound 40)",
        "+30 µs over the plain loop, Lightning +1,500 µs (bound 43)",
        "+30 µs over the plain loop, Fabric +80 µs (bound 80)",
    ]
    assert not any(row.all_claims for row in rows[1:])
    assert less_than(outcome(OURS, (400, 450)), None, 35) == []


def test_table_is_met_only_where_all_claims_are() -> None:
    rows = Row(("x", Claim("{}", 1, 2))), Row(("y", "3"), (Claim("{} in all", 3, 2),))
    assert Table("T", ("what", "n"), rows[:1]).met and not Table("T", ("what", "n"), rows).met
    assert str(Table("T", ("what", "n"), rows, "A note.", says="It says.")) == (
        "## T\n\nIt says.\n\n| what | n |\n| --- | ---: |\n| x | 1 (bound 2) |\n| y | 3 |\n\n- y: **3 in all (bound 2: missed)**\n\nA note."
    )


def test_sentence_names_ours_the_nearest_tool_and_lightning() -> None:
    lightning, fabric, skorch = chosen(PEERS, {"Lightning", "Fabric", "skorch"})
    text = str(
        shown([outcome(lightning, (400, 1900)), outcome(fabric, (400, 480)), outcome(OURS, (400, 440)), Outcome(skorch, error="no skorch")])
    )
    assert text.splitlines()[2].endswith("in a plain PyTorch loop: nbtrain 1.10 ×, Fabric 1.20 ×, Lightning 4.75 ×.")
    names = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert names[2:] == ["| nbtrain", "| Fabric", "| Lightning", "| skorch"]


@pytest.mark.parametrize("valid", [False, True])
def test_short_epochs_have_the_losses_of_the_plain_loop(valid: bool) -> None:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert epochs.ours(4, valid) == pytest.approx(epochs.plain(4, valid), rel=1e-12)
        epochs.lightning(2, valid)


def test_a_long_training_is_judged_by_its_last_part() -> None:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epoch_ms, after_mb = epochs.growth(20, 5)
    assert len(epoch_ms) == len(after_mb) == 4
    assert all(claim.met for claim in epochs.growth_row([2.0, 1.0, 1.0, 1.0, 1.05], [300.0, 301, 302, 303, 304]).all_claims)
    assert [claim.met for claim in epochs.growth_row([1.0, 1.0, 1.1, 1.2, 1.3], [300.0, 310, 320, 330, 340]).all_claims] == [False, False]


def test_calls_of_steps_epochs_and_runs_are_within_their_bounds() -> None:
    done = subprocess.run([sys.executable, counts.__file__], capture_output=True, text=True)  # without what the other tests have imported
    assert done.returncode == 0, done.stdout + done.stderr


def test_calls_of_python_and_built_in_functions_are_counted() -> None:
    def twice(x: list[int]) -> int:
        return len(x) + len(x)

    assert counts.n_calls(lambda: twice([])) == 1 + 1 + 2


def test_an_epoch_costs_what_it_adds_to_a_training() -> None:
    assert counts.n_each(lambda n: [len(""), *(abs(i) for i in range(n))]) == pytest.approx(2, abs=0.1)  # `abs`, and the generator
