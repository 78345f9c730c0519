"""Write the tables of docs/coming_from.md and docs/coming_from/: names from `nbtrain.compat.foreign_names`, and what comes along from
other systems, by reading files that they have written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nbtrain.compat.foreign_names import ARGUMENTS, LIBRARIES, MEMBERS, STEPS
from nbtrain.foreign.foreign_run import PARTS, ForeignRun
from nbtrain.foreign.readers import SYSTEMS, read_runs

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = (DOCS / "coming_from.md", *sorted((DOCS / "coming_from").glob("*.md")))
SAVED = ROOT / "tests" / "fixtures" / "foreign"
_NAMES = re.compile(r"(<!-- names of (\w+), made by `make names` -->\n).*?(?=^$|\Z)", re.M | re.S)
_RUNS = re.compile(r"(<!-- what comes along, made by `make names` -->\n).*?(?=^$|\Z)", re.M | re.S)
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


def runs_table() -> str:
    """A row for each system: its files, and which parts were taken of the files of a real run."""
    files = {system.name: system.files for system in SYSTEMS}
    assert files.keys() == _FILES.keys()
    lines = [f"| from | files | {' | '.join(PARTS)} |", f"| --- | --- |{' :-: |' * len(PARTS)}"]
    for system, path in _FILES.items():
        (run,) = read_runs(SAVED / path)
        assert system.startswith(run.system)
        lines.append(f"| {system} | {files[system]} | {' | '.join(_cell(run, part) for part in PARTS)} |")
    return "\n".join(lines) + "\n"


def _rows(library: str) -> Iterator[str]:
    for rows, before, after in ((STEPS, "def ", ""), (MEMBERS, "", ""), (ARGUMENTS, "", "=")):
        for row in rows:
            if names := row.theirs.get(library):
                yield f"| {', '.join(f'`{before}{name}{after}`' for name in names)} | {row.say} |"


def names_table(library: str) -> str:
    """The names of a library as Markdown: steps, then methods and attributes, then arguments."""
    return "\n".join([f"| {LIBRARIES[library]} | nbtrain |", "| --- | --- |", *_rows(library)]) + "\n"


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    with_names = {path: _NAMES.sub(lambda found: found[1] + names_table(found[2]), text) for path, text in texts.items()}
    return {path: _RUNS.sub(lambda found: found[1] + runs_table(), text) for path, text in with_names.items()}
