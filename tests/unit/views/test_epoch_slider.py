"""The slider of epochs: what it shows, what a click does, and what it says."""

from __future__ import annotations

import re
from html import unescape

import pytest

from nbtrain.engine.addon import Controls
from nbtrain.errors import CheckpointError
from nbtrain.views.epoch_slider import EpochSlider, ReachableEpoch, Travel
from nbtrain.views.notebook import _Live
from nbtrain.views.text import Board

PLACES = [ReachableEpoch(0), ReachableEpoch(1, "val_loss 0.7"), ReachableEpoch(3, "val_loss 0.4", is_best=True)]


def said(slider: EpochSlider) -> str:
    return unescape(re.sub(r"<[^>]+>", "", slider.words.value))


class Traveller:
    """Knows the epochs that can be reached, and notes what is done with them."""

    def __init__(self, places: list[ReachableEpoch]) -> None:
        self.places, self.done = places, list[tuple[str, int]]()
        self.error: BaseException | None = None
        self.slider = EpochSlider(Travel(lambda: self.places, {"Rewind here": self.rewind, "Branch here": self.branch}))

    def rewind(self, epoch: int) -> str:
        assert all(widget.disabled for widget in (self.slider.slider, *self.slider.buttons.values()))  # no second click meanwhile
        assert said(self.slider).startswith("Rewind here: ") and said(self.slider).endswith(" …")
        if self.error is not None:
            raise self.error
        self.done.append(("rewind", epoch))
        self.places = [place for place in self.places if place.epoch <= epoch]
        return f"rewound to {epoch}"

    def branch(self, epoch: int) -> str:
        self.done.append(("branch", epoch))
        return f"branched from <{epoch}>"


def test_slider_shows_the_epochs_that_can_be_reached_and_describes_the_chosen_one() -> None:
    slider = Traveller(PLACES).slider
    assert slider.refresh()
    assert [label for label, _ in slider.slider.options] == ["start", "1", "3 ★"]
    assert said(slider) == "the end of epoch 3 · val_loss 0.4"
    slider.slider.value = 0
    assert said(slider) == "the start of the run"


def test_click_says_what_it_is_doing_and_what_it_has_done() -> None:
    traveller = Traveller(PLACES)
    slider = traveller.slider
    slider.refresh()
    slider.slider.value = 1
    slider.buttons["Branch here"].click()
    assert said(slider) == "branched from <1>" and slider.chosen.epoch == 1
    slider.buttons["Rewind here"].click()
    assert said(slider) == "rewound to 1" and traveller.done == [("branch", 1), ("rewind", 1)]
    assert [label for label, _ in slider.slider.options] == ["start", "1"] and slider.chosen.epoch == 1
    assert not slider.slider.disabled and not slider.buttons["Rewind here"].disabled


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CheckpointError("No state leads there.", remedy="Run an epoch first."), "✗ No state leads there.\n  Run an epoch first."),
        (RuntimeError("of a user's step"), "✗ RuntimeError: of a user's step"),
    ],
)
def test_error_is_said_where_the_click_was_made(error: Exception, words: str) -> None:
    traveller = Traveller(PLACES)
    traveller.error = error
    traveller.slider.refresh()
    traveller.slider.press("Rewind here")
    assert said(traveller.slider) == words and not traveller.slider.slider.disabled


def test_interrupted_click_leaves_a_slider_that_works() -> None:
    traveller = Traveller(PLACES)
    traveller.error = KeyboardInterrupt()
    traveller.slider.refresh()
    with pytest.raises(KeyboardInterrupt):
        traveller.slider.press("Rewind here")
    assert said(traveller.slider) == "interrupted" and not traveller.slider.slider.disabled


def test_single_place_needs_no_slider_and_none_needs_nothing() -> None:
    traveller = Traveller([ReachableEpoch(0)])
    slider = traveller.slider
    assert slider.refresh() and slider.slider.layout.display == "none" and len(slider.slider.options) == 2
    slider.press("Branch here")
    assert traveller.done == [("branch", 0)]
    traveller.places = []
    assert not slider.refresh() and slider.buttons["Branch here"].disabled
    traveller.places = PLACES
    assert slider.refresh() and slider.slider.layout.display is None and slider.chosen.epoch == 3


def test_closed_slider_leaves_no_widget() -> None:
    from ipywidgets.widgets.widget import _instances

    before = set(_instances)
    slider = Traveller(PLACES).slider
    slider.refresh()
    slider.close()
    left = [_instances[name] for name in set(_instances) - before]
    assert {type(widget).__name__ for widget in left} <= {"LayoutModel", "Layout", "ButtonStyle", "SliderStyle", "HTMLStyle"}


def test_epochs_are_found_once_for_each_offer() -> None:
    asked: list[int] = []
    places: list[ReachableEpoch] = []

    def find() -> list[ReachableEpoch]:
        asked.append(len(places))
        return places

    live = _Live(Board(), "name", Controls({}, travel=Travel(find, {})))
    assert not live.offer() and live.slider is None and asked == [0]
    places += PLACES[:1]  # the start, in the first epoch: there is nothing to choose
    assert PLACES[0].epoch == 0 and not live.offer() and live.slider is None and asked == [0, 1]
    places += PLACES[1:]
    assert live.offer() and live.slider is not None and live.slider.chosen == PLACES[-1] and asked == [0, 1, 3]
    places.clear()
    assert not live.offer() and live.slider is None and asked == [0, 1, 3, 0]
