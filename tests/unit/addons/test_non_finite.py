"""Steps whose loss or gradient is not finite: raised, stopped at, or skipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import make_model, make_trainer, make_valid, same_weights
from torch.nn.functional import mse_loss

from nbtrain import AddOnBase, GradientClipAddon, NonFiniteAddon, StateManagerAddon, Trainer
from nbtrain.checkpoint.files import read_checkpoint
from nbtrain.checkpoint.weights import read_weights
from nbtrain.errors import ConfigError, StepError


class Linear(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model(x), y)}

    test_step = train_step


def make_batches(*bad: int, n: int = 8, value: float = float("nan")) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(n)]
    for index in bad:
        batches[index][1][0] = value
    return batches


def make(*addons: type[AddOnBase], **options: Any) -> Any:
    torch.manual_seed(0)
    return make_trainer(Linear.add_on(NonFiniteAddon, *addons), model=torch.nn.Linear(8, 1), **options)


@pytest.mark.parametrize("every_s", [0.0, 3600.0])  # each batch is flushed at once, or all of them when the epoch ends
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_first_bad_step_is_named_at_the_next_flush(every_s: float, value: float) -> None:
    trainer = make()
    trainer.recorder.every_s = every_s
    trainer.run(1, make_batches(), make_valid())
    with pytest.raises(StepError, match=r"^The training loss is (nan|inf) at epoch 2, batch 6, step 14\.\n  Its update is applied"):
        trainer.run(1, make_batches(5, 6, value=value), make_valid())
    assert trainer.counts.step == (14 if every_s == 0.0 else 16) and trainer.result.status == "failed"


@pytest.mark.parametrize("every_s", [0.0, 3600.0])
def test_head_of_the_error_has_the_batch_of_the_loss_and_not_the_next_one(every_s: float) -> None:
    trainer = make()
    trainer.recorder.every_s = every_s
    with pytest.raises(StepError) as error:
        trainer.run(1, make_batches(2), make_valid())
    text = "The training loss is nan at epoch 1, batch 3, step 3."
    assert trainer.result.reason == f"StepError at epoch 1, batch 3: {text}" and str(error.value).startswith(text)
    assert not getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("on_error", ["raise", "pause"])
def test_a_batch_without_rows_is_said_to_have_none(on_error: str) -> None:
    batches = make_batches()
    batches[3] = torch.zeros(0, 8), torch.zeros(0, 1)
    with pytest.raises(StepError, match="The batch has 0 rows, and the mean over none is nan: return None from the step for it."):
        make(on_error=on_error).run(1, batches)


def test_every_trainer_raises_by_default_and_ignores_when_told() -> None:
    def make_plain(**options: Any) -> Any:
        return make_trainer(Linear, model=torch.nn.Linear(8, 1), **options)

    with pytest.raises(StepError, match="The training loss is nan at epoch 1, batch 3, step 3"):
        make_plain().run(1, make_batches(2))
    trainer = make_plain(nonfinite="ignore")
    assert trainer.run(2, make_batches(2)).status == "completed" and math.isnan(trainer.history.last["train_loss"])
    trainer = make_plain(nonfinite="skip")
    trainer.run(1, make_batches(2))
    assert trainer[NonFiniteAddon].n_skipped == 1


def test_an_error_that_somebody_else_caught_comes_again() -> None:
    class Saving(L.Callback):
        """Flushes between two batches, as a button that saves does, and makes a note of the error."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                with pytest.raises(StepError, match="batch 3, step 3"):
                    pl_module.owner.recorder.flush()

    trainer = make(lightning={"callbacks": [Saving()]})
    trainer.recorder.every_s = 3600.0
    with pytest.raises(StepError, match="batch 4, step 4"):
        trainer.run(1, make_batches(2))


def test_trainer_is_whole_after_the_error() -> None:
    trainer = make(optimizer=lambda params: torch.optim.SGD(params, lr=0.01))  # it has no state that keeps a NaN
    with pytest.raises(StepError):
        trainer.run(1, make_batches(2))
    trainer.model.load_state_dict(make().model.state_dict())
    assert trainer.run(1, make_batches()).status == "completed" and len(trainer.recorder.sinks) == 1


def test_bad_weights_are_never_saved(tmp_path: Path) -> None:
    trainer = make(StateManagerAddon, save_path=tmp_path, every_n_steps=1)
    trainer.recorder.every_s = 3600.0  # only the save itself flushes
    with pytest.raises(StepError, match="batch 4, step 4"):
        trainer.run(1, make_batches(3))
    saved = sorted((trainer.run_dir / "checkpoints").glob("epoch=*"))
    assert [path.name for path in saved] == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt"]
    states = [read_checkpoint(path)["state_dict"] for path in saved]
    assert all(tensor.isfinite().all() for state in states for tensor in state.values())


def test_weights_of_an_earlier_run_are_not_written_over_by_bad_ones(tmp_path: Path) -> None:
    trainer = make(save_path=tmp_path)
    trainer.recorder.every_s = 0.0
    trainer.run(1, make_batches())
    good = read_weights(tmp_path / "run-001" / "last.safetensors")
    x, y = make_batches(n=1)[0]
    later = iter([(x, y), (x, y * float("nan"))])  # an epoch that is fine, then one that is not

    class Loader:
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            yield next(later)

    with pytest.raises(StepError, match="epoch 3, batch 1"):
        trainer.run(2, Loader())
    kept = read_weights(tmp_path / "run-001" / "last.safetensors")
    assert all(torch.equal(kept[name], good[name]) for name in good) and trainer.history.best.path.name == "best.safetensors"


def test_stop_ends_the_run_with_the_reason() -> None:
    trainer = make(nonfinite="stop")
    trainer.recorder.every_s = 0.0
    result = trainer.run(3, make_batches(2))
    assert (result.status, result.reason) == ("stopped", "The training loss is nan at epoch 1, batch 3, step 3")
    assert trainer.counts.step == 3


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_skipped_updates_are_as_if_their_batches_were_not_there(clip: float) -> None:
    addons = [GradientClipAddon] if clip else []
    trainer = make(*addons, nonfinite="skip", gradient_clip=clip)
    trainer.run(2, make_batches(1, 5))
    clean = make(*addons, nonfinite="skip", gradient_clip=clip)
    clean.run(2, [batch for index, batch in enumerate(make_batches()) if index not in (1, 5)])
    assert same_weights(trainer.model, clean.model) and trainer[NonFiniteAddon].n_skipped == 4
    assert trainer.history.last["train_skipped"] == 0.25 and clean.history.last["train_skipped"] == 0.0


def test_window_with_a_bad_batch_is_skipped_as_a_whole() -> None:
    trainer = make(nonfinite="skip", lightning={"accumulate_grad_batches": 2})
    trainer.run(1, make_batches(2))
    clean = make(nonfinite="skip", lightning={"accumulate_grad_batches": 2})
    batches = make_batches()
    clean.run(1, [*batches[:2], *batches[4:]])
    assert same_weights(trainer.model, clean.model)


def test_large_gradients_that_are_finite_are_no_fault() -> None:
    trainer = make(nonfinite="skip", optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    trainer.model.weight.data.fill_(1e18)
    trainer.run(1, make_batches(n=1))
    assert trainer[NonFiniteAddon].n_skipped == 0


def test_skipping_without_an_end_is_an_error() -> None:
    trainer = make(nonfinite="skip", max_skipped=2)
    with pytest.raises(StepError, match="gradients of 3 updates in a row are not finite"):
        trainer.run(1, make_batches(2, 3, 4))
    trainer.run(1, make_batches(0, 1, 3, 4))


@pytest.mark.parametrize("options", [{"nonfinite": "warn"}, {"max_skipped": -1}])
def test_unknown_ways_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**options)


def test_good_run_is_not_touched() -> None:
    plain = make_trainer(Linear, model=make_model())
    watched = make_trainer(Linear.add_on(NonFiniteAddon), model=make_model())
    for trainer in (plain, watched):
        torch.manual_seed(4)
        trainer.run(2, make_batches(), make_valid())
    assert same_weights(plain.model, watched.model)
