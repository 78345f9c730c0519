"""The notebooks are the source: the package is what they export, their outputs are fit to be read, README is the first of them."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from PIL import Image
from programs import by_commit, script
from samples import some

import nbtrain

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
# `make examples` runs these, and tests/browser the first of them
LONG = {"first_run", "gan", "index", "index.ko", "job", "language_model", "mnist1d", "several_gpus", "sweeps", "transformers"}
LONG |= {"multi_gpu", "two_gpus", "fsdp", "slurm", "cluster", "torch_compile"}
LONG |= {"lora", "export_onnx"}  # which need packages that `make examples` installs
INDEXES = script("build").indexes()
DOORS = ("tutorials", "howto")  # folders that the front page leads to
HOWTO = sorted(p for p in (ROOT / "nbs" / "howto").glob("*.ipynb") if p.stem != "index")
CHAPTERS = [p for p in NOTEBOOKS if p not in INDEXES and not (p.parent == ROOT / "nbs" and p.stem.startswith("index"))]
SHORT = [p for p in CHAPTERS if p.stem not in LONG and p not in HOWTO]
EVERY = 8  # of these, and of the how-to pages, `make test` executes each eighth one
FIRST = by_commit(EVERY)


def _sources(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder, without what nbdev and Jupyter keep beside them."""
    return [p for p in folder.rglob(pattern) if not {".ipynb_checkpoints", "__pycache__", "_modidx.py"} & set(p.parts)]


def test_package_is_what_the_notebooks_export(tmp_path: Path) -> None:
    for name in ("nbs", "nbtrain", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "runs")
        shutil.copytree(source, tmp_path / name, ignore=ignore) if source.is_dir() else shutil.copy(source, tmp_path / name)
    bin_ = Path(sys.executable).parent
    for command in (["ruff", "format", "--quiet", "nbs"], ["nbdev-clean"], ["nbdev-export"], ["ruff", "format", "--quiet", "nbtrain"]):
        subprocess.run([bin_ / command[0], *command[1:]], cwd=tmp_path, check=True, capture_output=True)
    for folder, pattern in (("nbtrain", "*.py"), ("nbs", "*.ipynb")):
        made, kept = ({p.relative_to(root): p.read_text() for p in _sources(root / folder, pattern)} for root in (tmp_path, ROOT))
        assert made.keys() == kept.keys()
        differ = [str(name) for name in made if made[name] != kept[name]]
        assert not differ, f"run `make format`: {differ}"


def _name(path: Path) -> str:
    return path.relative_to(ROOT / "nbs").with_suffix("").as_posix()


def test_every_notebook_is_in_the_one_index_of_its_folder() -> None:
    places = [(index, listed) for index in INDEXES for listed in script("build").listed(index)]
    assert sorted(listed for _, listed in places) == sorted(
        {*CHAPTERS, *INDEXES} - {INDEXES[0], *(ROOT / "nbs" / folder / "index.ipynb" for folder in DOORS)}
    )
    assert not [listed for index, listed in places if index.parent not in (listed.parent, listed.parent.parent)]


def test_titles_of_chapters_differ() -> None:
    titles = [
        nbformat.read(path, as_version=4).cells[0].source.partition("\n")[0]
        for path in {*CHAPTERS, *INDEXES}
        if path.parent.name not in DOORS
    ]
    assert sorted(titles) == sorted(set(titles))


@pytest.mark.parametrize("path", INDEXES, ids=_name)
def test_index_has_a_title_a_promise_and_one_picture(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert all(cell.cell_type == "markdown" for cell in cells)
    text = "\n\n".join(cell.source for cell in cells)
    assert re.match(r"# .+\n\n> .+\.\n", text)
    assert text.count("```text\n") == 1 or path.parent.name in DOORS
    assert max(map(len, text.partition("```text\n")[2].partition("```")[0].splitlines()), default=0) <= 80


def _exported(path: Path) -> list[tuple[bool, str]]:
    """The code cells, and whether each is exported; cells that only import are left out."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return [
        (exported, source)
        for source in cells
        if not ((exported := source.startswith("#| export")) and script("build").only_imports(source))
    ]


def _n_lines(source: str) -> int:
    """The lines of an exported cell that are read in one go: of a long class, which is one cell, those of its longest method."""
    (statement, *others) = ast.parse(source).body
    n = len(source.splitlines()) - 1
    if n <= 200 or others or not isinstance(statement, ast.ClassDef):
        return n
    return max((part.end_lineno or 0) - part.lineno + 1 for part in statement.body)


@pytest.mark.parametrize("path", CHAPTERS, ids=_name)
def test_exported_cells_are_short_and_followed_by_an_example(path: Path) -> None:
    exported = run = 0
    for is_export, source in _exported(path):
        n = _n_lines(source) if is_export else 0
        assert n <= 200, source.splitlines()[1]
        run = run + n if is_export else 0
        exported = max(exported, run)
    assert exported <= 250, "exported lines in a row without an example"


@pytest.mark.parametrize("path", CHAPTERS, ids=_name)
def test_outputs_are_fit_to_be_read(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and not cell.source.startswith("#| default_exp")]
    assert any(cell.outputs for cell in cells), "execute it: make notebooks"
    outputs = json.dumps([cell.outputs for cell in cells])
    assert "Warning" not in outputs and '"stderr"' not in outputs and '"error"' not in outputs
    assert not re.search(r"/(home|root|tmp|Users|usr|work)/|0x[0-9a-f]{8}", outputs)
    sizes = [(len(found), 200_000 if "nbtrain-shown" in found else 60_000) for found in (json.dumps(cell.outputs) for cell in cells)]
    assert all(size < most for size, most in sizes), "pictures that were shown take up to 200 kB"


@pytest.mark.parametrize("path", CHAPTERS, ids=_name)
def test_notebook_has_a_title_a_promise_and_no_star_imports(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert re.search(r"^> .+\.$", cells[0].source, re.M)
    assert path in HOWTO or any(re.search(r"^assert |^    assert ", cell.source, re.M) for cell in cells if cell.cell_type == "code")
    assert cells[-1].source.startswith("Not covered") or "\nNot covered" in cells[-1].source
    assert not any(re.search(r"^from \S+ import \*", cell.source, re.M) for cell in cells)


@pytest.mark.parametrize("path", some(SHORT, EVERY, first=FIRST), ids=_name)
def test_notebook_runs(path: Path, tmp_path: Path, warm_kernel: Any) -> None:
    notebook = script("execute").execute(path, str(tmp_path), warm_kernel())
    assert all(output.output_type != "error" for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)


def test_howto_pages_run_in_one_kernel(tmp_path: Path, warm_kernel: Any) -> None:
    """Each with an empty namespace, in a new folder: a kernel for each would spend most of the time with imports."""
    cells = []
    for path in HOWTO[FIRST::EVERY]:  # `make examples` executes all
        if path.stem not in LONG:
            (tmp_path / path.stem).mkdir()
            cells.append(f"%reset -f\nimport os; os.chdir({str(tmp_path / path.stem)!r})")
            cells += [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    together = tmp_path / "together.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells]), together)
    script("execute").execute(together, str(tmp_path), warm_kernel())


@pytest.mark.parametrize("path", HOWTO, ids=_name)
def test_howto_page_answers_one_question(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    first, last = cells[0].source, cells[-1].source
    assert re.match(r"# .+\n\n> .+\.\n\nUse this .+[^\n]\Z", first) and len(first.partition("\n")[0]) <= 60
    code = [cell.source.splitlines() for cell in cells if cell.cell_type == "code"]
    assert all(len(lines) <= 25 for lines in code)
    assert not [line for lines in code for line in lines if len(line) > 88], "wider than the page"
    shown = [cell.source for cell in cells if cell.cell_type == "code" and "test" not in cell.metadata.get("tags", [])]
    assert not [source for source in shown if re.search(r"^ *assert ", source, re.M)], (
        "in a cell with the tag `test`, which the site leaves out"
    )
    see = last.partition("See also: ")[2]
    assert "(../tutorials/" in see and "(../../docs/" in see and "\n" not in see


def _notebook_with(text: str) -> nbformat.NotebookNode:
    output = nbformat.v4.new_output("stream", text=text)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])])


def test_results_are_the_metrics_of_tables_and_of_lines() -> None:
    table = "Digits · cpu\nepoch  train_loss  val_acc  train_samples_per_s  time\n    1       2.078   0.8129                 1000  0.1s ★\n"
    line = "epoch 1/2 · train_loss 1.5 · train_step_time_s 0.3 · time 0.5s ★\n{'loss': 0.25, 'f1': 1e-2}"
    found = script("execute").results(_notebook_with(table + line))
    values = [("train_loss", 2.078), ("val_acc", 0.8129), ("train_loss", 1.5), ("loss", 0.25), ("f1", 0.01)]
    assert found == [(0, name, value) for name, value in values]


def test_metrics_that_differ_are_told() -> None:
    differences = script("execute").differences
    stored = _notebook_with("val_loss 1.0 · val_acc 0.5 · time 1.0s")
    other = _notebook_with("val_loss 1.04 · val_acc 0.5 · time 9.0s")
    assert differences(stored, _notebook_with("val_loss 1.00001 · val_acc 0.5 · time 9.0s")) == []
    assert differences(stored, other) == ["cell 0: val_loss is 1, 1.04 came out"]
    assert differences(stored, other, 0.05) == []  # what another processor may make of it
    text = "cell 0: the text is 'val_loss 1.0 · val_acc 0.5 · time 1.0s', 'val_loss 1.0' came out"
    assert differences(stored, _notebook_with("val_loss 1.0")) == ["other metrics: 2 are stored, 1 came out", text]


def test_the_first_line_of_a_cell_with_other_words_is_told() -> None:
    differences = script("execute").differences
    stored = _notebook_with("<Net at 0x7f3a>\nsaved 1,204 steps in 1.2 s\nfree: 3 GB ▁▂▃")
    assert differences(stored, _notebook_with("<Net at 0x7e00>\nsaved   98 steps in 15 ms\nfree: 512 MB ▃▁▂")) == []
    fresh = _notebook_with("<Net at 0x7e00>\nwrote 1,204 steps in 1.2 s\nfull: 3 GB ▁▂▃")
    assert differences(stored, fresh) == ["cell 0: the text is 'saved 1,204 steps in 1.2 s', 'wrote 1,204 steps in 1.2 s' came out"]
    stored.cells[0].metadata["tags"] = ["varies"]
    assert differences(stored, fresh) == []
    assert differences(_notebook_with("a"), _notebook_with("a\nb")) == ["cell 0: the text is '', 'b' came out"]


def test_readme_knows_the_version() -> None:
    assert script("make_readme").version() == nbtrain.__version__
    assert (ROOT / "docs" / "images" / "notebook.png").stat().st_size > 5_000


def test_picture_in_motion_is_small_lasts_five_seconds_and_has_a_still_one() -> None:
    for theme in ("light", "dark"):
        path = ROOT / "docs" / "images" / f"run-{theme}.webp"
        assert path.stat().st_size < 500_000
        with Image.open(path) as moving, Image.open(path.with_suffix(".png")) as still:
            assert moving.n_frames >= 10 and moving.size == still.size and moving.width >= 900
            durations = []
            for i in range(moving.n_frames):
                moving.seek(i)
                moving.load()
                durations.append(moving.info["duration"])
            assert 4_000 <= sum(durations) <= 5_500 and moving.info["loop"] == 0


def test_cells_that_draw_have_their_picture() -> None:
    drawn = re.compile(r"^\w+, \w+ = plt\.subplots\(", re.M)
    missing = []
    for path in NOTEBOOKS:
        for i, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code" and drawn.search(cell.source) and not any("image/png" in o.get("data", {}) for o in cell.outputs):
                missing.append((_name(path), i))
    assert not missing, "run `make notebooks`"


def test_figure_in_a_kernel_of_ours_is_an_output(tmp_path: Path, warm_kernel: Any) -> None:
    path = tmp_path / "drawn.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])")]), path
    )
    (output,) = script("execute").execute(path, str(tmp_path), warm_kernel()).cells[0].outputs
    assert "image/png" in output["data"]


def test_korean_readme_has_the_code_of_the_other() -> None:
    korean = ROOT / "nbs" / "index.ko.ipynb"

    def code(path: Path) -> list[str]:
        return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]

    def quoted(path: Path) -> list[str]:
        return re.findall(r"`[^`\n]+`|^#+ |\]\([^)\s]+\)", path.read_text(encoding="utf-8"), re.M)

    assert code(korean) == code(ROOT / "nbs" / "index.ipynb")
    assert sorted(quoted(ROOT / "README.ko.md")) == sorted(quoted(ROOT / "README.md")), "a part is missing or was added"


def _lines(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Lines of code, without docstrings, comments and blank lines."""
    source = ast.parse(ast.unparse(node))
    for inner in ast.walk(source):
        body = getattr(inner, "body", None)
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            inner.body = body[1:] or [ast.Pass()]
    return len([line for line in ast.unparse(source).splitlines() if line.strip()])


LOOPS = ("train_epoch", "train_batch", "evaluate")  # read in one piece: a batch goes through them in a straight line


def test_functions_are_short() -> None:
    long = {}
    for path in (ROOT / "nbtrain").rglob("*.py"):
        if path.name == "_modidx.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and _lines(node) > 32 and node.name not in LOOPS:
                long[f"{path.name}:{node.name}"] = _lines(node)
    assert not long
