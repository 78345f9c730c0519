"""Write the table of what comes along from other systems in docs/coming_from.md, by reading files that they have written: `make names`."""

from __future__ import annotations

import re
from pathlib import Path

from nbtrain.foreign.foreign_run import PARTS, ForeignRun
from nbtrain.foreign.readers import READERS, read_runs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "coming_from.md"
SAVED = ROOT / "tests" / "fixtures" / "foreign"
_TABLE = re.compile(r"(<!-- what comes along, made by `make names` -->\n).*?(?=^$|\Z)", re.M | re.S)
_FILES = {  # the files of a run of each system
    "Lightning": "lightning",
    "Lightning, FSDP": "lightning_fsdp/epoch=1-step=10.ckpt",
    "Hugging Face Trainer": "hf_trainer",
    "accelerate": "accelerate/epoch_1",
    "DeepSpeed": "deepspeed_2",
    "a script": "script/last.pt",
    "zae-engine": "zae/saved",
    "tlama-core": "tlama/checkpoints/checkpoint_step_00000009.pt",
    "nnScaler": "nnscaler/merged.ckpt",
    "OmniGenBench": "omnigenbench/ogb_epoch_2_seed_42_loss_0.5000_seed_42_f1_score_0.5000",
    "Neptune": "neptune/run.csv",
}


def _cell(run: ForeignRun, part: str) -> str:
    if part == "epoch and step" and run.weights and not (run.epoch and run.step):
        return "epoch" if run.epoch else "step" if run.step else "–"
    return "✓" if part in run.taken() else "–"


def table() -> str:
    """A row for each reader: what it reads, and which parts were taken of the files of a real run."""
    files = {reader.system: reader.files for reader in READERS}
    assert files.keys() == _FILES.keys()
    lines = [f"| from | files | {' | '.join(PARTS)} |", f"| --- | --- |{' :-: |' * len(PARTS)}"]
    for system, path in _FILES.items():
        (run,) = read_runs(SAVED / path)
        assert system.startswith(run.system)
        lines.append(f"| {system} | {files[system]} | {' | '.join(_cell(run, part) for part in PARTS)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    return _TABLE.sub(lambda found: found[1] + table(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
