"""Samples with predictions: the right ones, in order, and nothing is changed by looking."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from samples import DEVICE
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import ConfigError, StepError, Trainer
from nbtrain.tools.gallery import Gallery, Sample, draw_sample, rgb
from tests.samples import Regress, make_data, make_loader, make_trainer


class Classify(Trainer):
    """Two classes of points; asks for the loss of a whole batch only."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "output": logits}

    test_step = train_step


class WithLosses(Classify):
    """The same with a loss for each sample."""

    n_calls = 0

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.n_calls += 1
        x, y = batch
        logits = self.model(x)
        return {"losses": cross_entropy(logits, y, reduction="none"), "output": logits, "label": y}


def make_points(n: int = 20) -> TensorDataset:
    torch.manual_seed(3)
    x = torch.randn(n, 8)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_classifier(kind: type[Trainer] = Classify) -> Any:
    torch.manual_seed(0)
    return make_trainer(kind, model=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)))


def expected_losses(trainer: Any) -> torch.Tensor:
    x, y = make_points().tensors
    trainer.model.eval()
    with torch.no_grad():
        losses = cross_entropy(trainer.model(x.to(DEVICE)).cpu(), y, reduction="none")
    trainer.model.train()
    return losses


def test_the_first_samples_come_in_the_order_of_the_loader() -> None:
    trainer, data = make_classifier(), make_points()
    shown = trainer.show_results(DataLoader(data, batch_size=4), 6)
    assert [sample.index for sample in shown.samples] == [0, 1, 2, 3, 4, 5]
    assert all(torch.equal(sample.input, data[i][0]) and sample.label == data[i][1] for i, sample in enumerate(shown.samples))
    assert torch.allclose(torch.stack([sample.output for sample in shown.samples]), trainer.predict(data.tensors[0])[:6])


def test_no_more_batches_are_run_than_hold_the_samples() -> None:
    trainer = make_classifier(WithLosses)
    trainer.show_results(DataLoader(make_points(), batch_size=4), 6)
    assert trainer.n_calls == 2


def test_a_loader_with_fewer_samples_gives_what_it_has() -> None:
    shown = make_classifier().show_results(DataLoader(make_points(3), batch_size=2), 8)
    assert shown.title == "The first 3 samples" and len(shown.samples) == 3


@pytest.mark.parametrize("kind", [Classify, WithLosses], ids=["one by one", "losses of the step"])
def test_the_worst_samples_are_those_of_the_highest_loss(kind: type[Trainer]) -> None:
    trainer = make_classifier(kind)
    losses = expected_losses(trainer)
    worst = trainer.show_worst(DataLoader(make_points(), batch_size=6), 5)
    assert [sample.index for sample in worst.samples] == losses.argsort(descending=True)[:5].tolist()
    assert [sample.loss for sample in worst.samples] == pytest.approx(losses.sort(descending=True).values[:5].tolist())
    assert worst.title == "The worst 5 of 20 samples, by loss"


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    class Nan(WithLosses):
        def test_step(self, batch: Any) -> dict[str, Any]:
            output = super().test_step(batch)
            return output | {"losses": torch.tensor([1.0, float("nan"), 3.0, 0.5])}

    worst = make_classifier(Nan).show_worst(DataLoader(make_points(4), batch_size=4), 3)
    assert [sample.index for sample in worst.samples] == [1, 2, 0]


def test_steps_see_mode_test_while_samples_are_looked_at() -> None:
    class Noting(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            modes.append((self.mode, self.model.training))
            return super().test_step(batch)

    modes: list[Any] = []
    make_trainer(Noting).show_results(make_loader(), 3)
    assert modes == [("test", False)]


def test_a_dict_of_tensors_and_texts_is_cut_into_samples() -> None:
    class Texts(Trainer):
        def test_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
            return {"loss": batch["ids"].float().mean(), "output": batch["ids"].float().mean(1), "label": batch["label"]}

        train_step = test_step

    batch = {"ids": torch.tensor([[1, 2], [5, 6], [3, 4]]), "text": ["a", "b", "c"], "label": torch.tensor([0, 1, 2])}
    worst = make_trainer(Texts).show_worst([batch], 2).samples
    assert [(s.batch["text"], s.prediction, int(s.label), s.loss) for s in worst] == [(["b"], 5.5, 1, 5.5), (["c"], 3.5, 2, 3.5)]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (Sample(0, torch.zeros(3), torch.tensor([0.0, 1.0]), torch.tensor(1)), "predicted 1 ✓"),
        (Sample(0, torch.zeros(3), torch.tensor([0.0, 1.0]), torch.tensor(0), 2.5), "predicted 1, is 0 · loss 2.5"),
        (Sample(0, torch.zeros(3), torch.tensor([0.25]), torch.tensor([0.5])), "predicted 0.25, is 0.5"),
        (Sample(0, torch.zeros(3), torch.tensor([0.0, 1.0])), "predicted 1"),
        (Sample(0, torch.zeros(3), torch.tensor([0.0, 1.0]), 0, 2.5, classes=["cat", "dog"]), "predicted dog, is cat · loss 2.5"),
        (Sample(0, torch.zeros(3), torch.tensor([0.0, 1.0]), -100, classes=["cat", "dog"]), "predicted dog, is -100"),
        (
            Sample(0, torch.zeros(3), torch.zeros(2, 4, 4), torch.zeros(4, 4)),
            "predicted Tensor (2, 4, 4) float32, is Tensor (4, 4) float32",
        ),
    ],
)
def test_a_sample_says_prediction_label_and_loss(sample: Sample, words: str) -> None:
    assert sample.words == words


@pytest.mark.parametrize(
    ("value", "drawn"),
    [
        (torch.rand(1, 8, 8), "images"),
        (torch.randn(3, 8, 8), "images"),
        (torch.randint(0, 255, (3, 8, 8), dtype=torch.uint8), "images"),
        (torch.rand(8, 8), "images"),
        (torch.randn(6), "patches"),
        (torch.randn(100), "lines"),
        (torch.randn(7, 2, 2, 2), "texts"),
        (torch.tensor(1.0), "texts"),
        ("a text", "texts"),
    ],
    ids=["grey", "colour", "bytes", "plane", "features", "curve", "volume", "number", "text"],
)
def test_inputs_are_drawn_by_their_shape(value: Any, drawn: str) -> None:
    figure = Gallery([Sample(0, value, torch.tensor([0.5]))], "One").plot()
    assert len(getattr(figure.axes[0], drawn)) > 0


def test_a_drawing_of_ones_own_gets_axes_and_sample() -> None:
    def draw(axes: Any, sample: Sample) -> None:
        axes.set_title(f"sample {sample.index}")

    shown = make_classifier().show_results(DataLoader(make_points(), batch_size=4), 5, draw=draw)
    assert [axes.get_title() for axes in shown.plot().axes] == [f"sample {i}" for i in range(5)]


def test_a_terminal_shows_a_table_and_a_notebook_a_figure_with_words() -> None:
    samples = [Sample(4, torch.zeros(1, 2, 2), torch.tensor([0.0, 1.0]), torch.tensor(0), 2.5)]
    gallery = Gallery(samples, "The worst 1 of 5 samples, by loss", draw_sample)
    assert repr(gallery) == "The worst 1 of 5 samples, by loss\nsample  prediction  label  loss\n     4           1      0   2.5"
    assert '<img alt="predicted 1, is 0 · loss 2.5"' in gallery._repr_html_()


@pytest.mark.parametrize("n", [0, -1])
def test_a_number_of_samples_below_one_is_refused(n: Any) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer().show_worst(make_loader(), n)
    assert str(error.value) == f"n={n!r} must be a positive integer.\n  Give an integer from 1."


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(ConfigError, match="The loader is empty: it has no batch."):
        make_trainer().show_results([])


class Nothing:
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("show", ["show_results", "show_worst"])
def test_a_loader_without_length_that_gives_nothing_is_refused(show: str) -> None:
    with pytest.raises(StepError, match="The loader gave no batch."):
        getattr(make_trainer(), show)(Nothing())


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"loss": torch.tensor(1.0)}, "test_step returned 'loss', without 'output'."),
        ({"output": torch.zeros(16)}, "test_step returned 'output', and no loss."),
        ({"output": torch.zeros(3), "loss": torch.tensor(1.0)}, "test_step returned 'output' of shape (3,) for a batch of 16."),
        ({"output": torch.zeros(16), "losses": torch.zeros(3)}, "test_step returned 'losses' of shape (3,) for a batch of 16."),
    ],
)
def test_a_step_that_lacks_something_is_told_so(output: dict[str, Any], message: str) -> None:
    class Odd(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return output

    with pytest.raises(StepError) as error:
        make_trainer(Odd).show_worst(DataLoader(make_data(16), batch_size=16), 2)
    assert str(error.value).startswith(message) and "Odd.test_step" in str(error.value)


# -- titles
def titles_of(gallery: Gallery) -> list[Any]:
    """The drawn figure's titles: text and the rectangle that it takes, in pixels."""
    figure = gallery.plot()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [(axes.title.get_text(), axes.title.get_window_extent(canvas.get_renderer()), figure.bbox) for axes in figure.axes]


NAMES = [
    "cat",
    "American Staffordshire terrier, or a dog that looks like one",
    "Pneumonoultramicroscopicsilicovolcanoconiosis",
    "WWW MMM WWW MMM",
]


@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.parametrize("classes", [None, NAMES], ids=["numbers", "long names"])
def test_titles_do_not_overlap(n: int, classes: list[str] | None) -> None:
    samples = [Sample(i, torch.rand(1, 8, 8), torch.eye(4)[i % 4], torch.tensor((i + 1) % 4), 5.954321, classes=classes) for i in range(n)]
    titles = titles_of(Gallery(samples, "Some"))
    for i, (_, box, whole) in enumerate(titles):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
        assert not any(box.overlaps(other) for _, other, _ in titles[i + 1 :])
    if classes is None:
        assert titles[0][0] == "predicted 0, is 1\nloss 5.954"


def test_dollars_in_the_name_of_a_class_are_no_formula() -> None:
    sample = Sample(0, torch.rand(1, 8, 8), torch.tensor([0.0, 1.0]), 1, classes=["a", "$x_"])
    assert titles_of(Gallery([sample], "One"))[0][0] == "predicted $x_ ✓"


def test_classes_have_their_names_in_a_gallery() -> None:
    shown = make_classifier().show_worst(DataLoader(make_points(), batch_size=4), 3, classes=["below", "above"])
    assert all(re.fullmatch(r"predicted (below|above)( ✓|, is (below|above)) · loss \S+", sample.words) for sample in shown.samples)


@pytest.mark.parametrize("scale", [(0.0, 1.0), (-2.1, 2.6), (0.0, 255.0)], ids=["unit", "normalised", "by 255"])
def test_colours_of_an_image_are_those_of_its_values(scale: tuple[float, float]) -> None:
    image = torch.rand(3, 8, 8)
    image[:, 0, 0], image[:, 0, 1] = 0.0, 1.0
    assert torch.allclose(rgb(scale[0] + image * (scale[1] - scale[0])), image.movedim(0, -1), atol=1e-5)


def test_dark_bytes_stay_dark() -> None:
    assert torch.equal(rgb(torch.full((3, 2, 2), 51, dtype=torch.uint8)), torch.full((2, 2, 3), 0.2))
