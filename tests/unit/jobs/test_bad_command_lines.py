"""Bad command lines: each ends with exit code 2 and one error, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbtrain.cli import main

BASE = """\
max_epochs: 1
micro_batch_size: 4
model: {type: nbtrain.examples.mlp.MLP, args: {dim: 8, nlayers: 2}}
optimizer: {type: torch.optim.Adam, args: {lr: 0.01}}
dataset: {type: nbtrain.examples.mlp.SimpleDataset, train_args: {dim: 8, size: 8}}
checkpoint: {no_save: true}
"""
LINES = """\
fit
fit -f
fit -f nothing.yaml
fit -f folder
fit -f not_text.yaml
fit bad.ipynb
fit -f base.yaml --seed 1.5
fit -f base.yaml --seed 99999999999999999999999
fit -f base.yaml --optimizer.args.lr x
fit -f base.yaml --optimizer.args.lr -1
fit -f base.yaml --model.args.dim x
fit -f base.yaml --model.args.dim -3
fit -f base.yaml --lr_scheduler.type builtins.print --lr_scheduler.interval step
fit -f base.yaml --trainer.type os.getcwd
fit -f base.yaml --trainer.args.seed x
fit -f base.yaml --trainer.args.monitor 3
fit -f base.yaml --dataloader.train_args.num_workers -1
fit -f base.yaml --dataloader.train_args.num_workers x
fit -f base.yaml --dataloader.type builtins.print
fit -f base.yaml --dataset_sampler.type builtins.print
fit -f base.yaml --addons.0.type EMAAddon --addons.0.args.ema_decay x
predict -f base.yaml -o folder --dataset.test_args.dim 8 --dataset.test_args.size 8
plan -f base.yaml --memory 0
plan -f base.yaml --memory 1e400
export bad.ipynb
resume nothing
sweep -f base.yaml --seed 5..1
sweep -f base.yaml --seed 0..99999999
sweep -f base.yaml --seed 0..99999999999999999999999999
sweep -f base.yaml --seed 0..999 --optimizer.args.lr 1,2,3,4 --model.args.dim 1..999
sweep -f base.yaml --jobs ²
sweep -f base.yaml --seed 0..1 -o base.yaml
demo --seed 1.5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    Path("not_text.yaml").write_bytes(b"\xff\xfe\x00bad")
    Path("bad.ipynb").write_text('{"cells": 3}')
    Path("folder").mkdir()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", LINES.splitlines())
def test_bad_command_line_ends_with_2_and_one_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(line.split())
    except SystemExit as end:  # argparse's own
        code = end.code
    shown = capsys.readouterr().err
    assert code == 2 and "Traceback" not in shown
    assert sum(row.startswith("nbtrain") and ": " in row for row in shown.splitlines()) == 1
