"""Bad configurations, and the whole text that a user is shown for each. The base file is good; `case.yaml` is merged over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nbtrain import TrainerArgs
from nbtrain.cli import main
from nbtrain.errors import ConfigError

GOOD = """\
max_epochs: 1
micro_batch_size: 4
model:
  type: nbtrain.examples.mlp.MLP
  args: {dim: 8, nlayers: 2}
optimizer:
  type: torch.optim.Adam
  args: {lr: 0.01}
dataset:
  type: nbtrain.examples.mlp.SimpleDataset
  train_args: {dim: 8, size: 8}
checkpoint: {no_save: true}
"""
CASES = yaml.safe_load((Path(__file__).parent / "bad_configs.yaml").read_text())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("nbtrain.jobs.validate.n_cores", lambda: 1)
    (tmp_path / "base.yaml").write_text(GOOD)
    (tmp_path / "needs_other.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    return tmp_path


def test_the_base_is_good() -> None:
    TrainerArgs.from_yaml("base.yaml").check()


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 25


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_bad_configuration_is_told_whole(case: dict[str, str], folder: Path) -> None:
    (folder / "case.yaml").write_text(case.get("config", ""))
    with pytest.raises(ConfigError) as caught:
        TrainerArgs.from_cli(["-f", "base.yaml", "-f", "case.yaml", *case.get("arguments", "").split()]).check()
    assert str(caught.value) == case["error"].rstrip("\n")


def test_a_bad_configuration_exits_with_2_before_any_data_is_touched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "touched.py").write_text("def data(): open('touched', 'w')\n")
    (folder / "case.yaml").write_text("dataset!: {type: touched.data}\nmodel: {type: nbtrain.examples.mlp.MPL}\n")
    assert main(["fit", "-f", "base.yaml", "-f", "case.yaml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "nbtrain: of several files the later ones win: they replace model.type."
    assert said[1].startswith("nbtrain: model.type: 'nbtrain.examples.mlp.MPL' can't be imported")
    assert not (folder / "touched").exists()
