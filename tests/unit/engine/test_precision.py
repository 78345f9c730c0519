"""Names of precisions, what a device can do, and dtypes of parts."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights
from torch import nn

from nbtrain.engine.precision import resolve_precision
from nbtrain.errors import ConfigError
from nbtrain.loops.batch_ways import is_plain

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("given", ["bf16", "bfloat16", "bf16-mixed", ["fp16", "bf16"], ["bf16", "fp32"]])
def test_names_of_one_precision_are_one(given: Any) -> None:
    assert resolve_precision(given, CPU) == "bf16-mixed"
    assert [resolve_precision(name, CPU) for name in ("fp32", 32, "32", "float32", "auto", 64, None)] == ["32-true"] * 5 + ["64-true", None]


def test_weights_have_16_bits_only_where_that_is_spelled_out() -> None:
    for given, dtype in {"bf16": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}.items():
        trainer = make_trainer(model=make_model(), precision=given)
        seen: list[torch.dtype] = []
        trainer.model.register_forward_hook(lambda module, args, output, seen=seen: seen.append(next(module.parameters()).dtype))
        trainer.run_batch(next(iter(make_loader())))
        assert seen == [dtype]


@pytest.mark.parametrize(("capability", "best"), [((9, 0), "bf16-mixed"), ((7, 5), "16-mixed")])
def test_auto_and_lists_ask_the_device(capability: tuple[int, int], best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_precision("auto", CUDA) == resolve_precision(["bf16", "fp16"], CUDA) == best
    assert resolve_precision("fp16", CUDA) == "16-mixed"


NO_FP16 = 'fp16 needs a GPU, and the device is the CPU.\n  Give precision="bf16", or "auto" for the best of the device.'


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("fp16", f"precision='fp16': {NO_FP16}"),
        (16, f"precision=16: {NO_FP16}"),
        ("bf61", "precision='bf61' is unknown.\n  Did you mean 'bf16'?"),
        (["fp16", "16-true"], "precision=['fp16', '16-true']: cpu supports none of them.\n  Add \"fp32\" at the end."),
        ({"parm": "bf16"}, "precision: there is no 'parm'.\n  Did you mean 'param'?"),
        ({"param": "bf17"}, "precision: param='bf17' is not a dtype.\n  Did you mean 'bf16'?"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_what_can(given: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(device="cpu", precision=given)
    assert str(caught.value) == text


class Scaled(nn.Linear):
    """Has a buffer that is multiplied in its own dtype."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return super().forward(x).float() * self.scale


def test_parts_have_their_dtypes_on_the_short_way() -> None:
    plain: list[bool] = []

    class Looks(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            plain.append(is_plain(trainer))

    class Casts(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step((batch[0], batch[1].float()))  # a loss of two dtypes has no gradients in torch 2.9

    precision = {"param": "bf16", "input": torch.bfloat16}
    trainer = make_trainer(Casts, model=Scaled(), precision=precision, lightning={"callbacks": [Looks()]})
    trainer.run(1, make_loader(), make_valid())
    assert trainer.model.weight.dtype == torch.bfloat16 and trainer.model.scale.dtype == torch.float32
    assert trainer.predict(torch.ones(2, 8)).dtype == torch.float32 and plain == [True]
    assert trainer.lr_find(make_loader(), n_batches=20).losses


def test_same_dtypes_change_nothing() -> None:
    plain, cast = make_trainer(model=make_model()), make_trainer(model=make_model(), precision={"param": "fp32", "input": "fp32"})
    for trainer in (plain, cast):
        torch.manual_seed(1)
        trainer.run(2, make_loader())
    assert same_weights(plain.model, cast.model)


def test_fp16_gradients_are_unscaled_before_they_are_clipped() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    half = make_trainer(model=make_model(), gradient_clip=1e-3, precision=plugin)
    single = make_trainer(model=make_model(), gradient_clip=1e-3)
    for trainer in (half, single):
        torch.manual_seed(1)
        trainer.run(1, make_loader())
    norms = [trainer.history.steps["train"]["train_grad_norm"] for trainer in (half, single)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


@pytest.mark.parametrize("part", ["param", "input"])
def test_a_cast_of_one_part_alone_says_what_is_missing_where_the_step_needs_both(part: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer(precision={part: "bf16"}).run(1, make_loader())
    what, remedy = str(error.value).split("\n  ")
    assert what.startswith(f"precision casts {part} alone, and the step needs one dtype: ")
    assert remedy == "Give param and input the same dtype, or the name of mixed precision: bf16-mixed."


def test_an_error_about_dtypes_where_both_are_cast_is_the_user_s_own() -> None:
    class Wrong(Regress):
        def train_step(self, batch: Any) -> Any:
            raise RuntimeError("another dtype")

    with pytest.raises(RuntimeError, match="^another dtype"):
        make_trainer(Wrong, precision={"param": "bf16", "input": "bf16"}).run(1, make_loader())
