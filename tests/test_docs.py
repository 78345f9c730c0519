"""The pages of the documentation: their links lead somewhere, and every block of code runs and prints what the page says."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import proofs
import pytest
import versions
from programs import script

import nbtrain
from nbtrain.views.terminal import LogView

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
PAGES = sorted(path for path in DOCS.rglob("*.md") if "```python\n" in path.read_text(encoding="utf-8"))


def _texts(path: Path) -> str:
    """What a page or a notebook says, without code."""
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return "\n\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")


def _anchors(text: str) -> set[str]:
    """The addresses of the headings, and those that a page gives itself."""
    titles = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", title)) for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {title.strip().lower().replace(" ", "-") for title in titles} | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


def test_links_in_pages_and_notebooks_lead_somewhere() -> None:
    pages = [path for folder in ("nbs", "docs") for kind in ("*.md", "*.ipynb") for path in (ROOT / folder).rglob(kind)]
    texts, dead = {path: _texts(path) for path in [*pages, ROOT / "README.md"] if ".ipynb_checkpoints" not in path.parts}, []
    for path, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`(?!\])", "", text)):
            parts = urlsplit(link)
            folder = ROOT if path.parent == ROOT / "nbs" and link.startswith("docs/images/") else path.parent  # README.md is made of it
            target = (folder / unquote(parts.path)).resolve() if parts.path else path
            is_dead = not target.exists() or (parts.fragment and target in texts and parts.fragment not in _anchors(texts[target]))
            if not parts.scheme and is_dead:
                dead.append(f"{path.relative_to(ROOT)}: {link}")
    assert not dead


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_code_of_a_page_runs_and_prints_what_the_page_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LogView, "_line", lambda *args: None)  # what a run prints while it trains
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(text for kind, text in blocks if kind == "python"))
    runpy.run_path(str(script), run_name="__main__")  # whose classes are sent to other processes
    assert capsys.readouterr().out == "".join(text for kind, text in blocks if kind == "text")


PROOFS = {"benchmarks": "bench", "ecosystem": "ecosystem", "performance": "gpu", "plain_loop": "compare", "soak": "soak"}


def test_page_that_proves_something_names_its_command_its_commit_and_its_day() -> None:
    made = {name: re.findall(r"^Made by `make ([\w-]+)` at commit (.+)\.$", (DOCS / f"{name}.md").read_text(), re.M) for name in PROOFS}
    assert {name: [command for command, _ in found] for name, found in made.items()} == {
        name: [command] for name, command in PROOFS.items()
    }
    rows = versions.rows().values()
    assert all(row.tests and row.step for row in rows)
    sources = [source for found in made.values() for _, source in found] + [row.source for row in rows]
    assert not [source for source in sources if not proofs.SOURCE.fullmatch(source)]
    assert proofs.SOURCE.fullmatch(proofs.source())
    cited = set(re.findall(r"Proof:\s+`docs/(\w+)\.md`", (ROOT / "README.md").read_text()))
    assert cited and cited <= PROOFS.keys()


def _lasting_folder() -> Path:
    """What the recipe of resume.md finds here."""
    code = next(text for _, text in BLOCK.findall((DOCS / "resume.md").read_text(encoding="utf-8")) if "def lasting_folder" in text)
    tree = ast.parse(code)
    tree.body = [
        node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "name", "") == "lasting_folder"
    ]
    names: dict[str, Any] = {}
    exec(compile(tree, "resume.md", "exec"), names)
    return names["lasting_folder"]()


def test_recipe_saves_to_drive_on_colab(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted: list[str] = []
    colab = ModuleType("google.colab")
    colab.drive = SimpleNamespace(mount=mounted.append)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    assert _lasting_folder() == Path("/content/drive/MyDrive/runs")
    assert mounted == ["/content/drive"]


def test_recipe_saves_to_the_output_on_kaggle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/kaggle/working"))
    assert _lasting_folder() == Path("/kaggle/working/runs")


def test_architecture_shows_the_packages_and_names_modules_that_exist() -> None:
    drawn = script("make_architecture")
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    packages, words = "|".join(drawn.order()), page.replace(drawn.loop(), "")
    named = set(re.findall(r"`nbtrain\.([\w.]+)`", words)) | set(re.findall(rf"\b((?:{packages})\.[a-z_]+)\b", words))
    assert len(named) > 20 and not named - drawn.names() - {"events.jsonl", "run.yaml", "trainer.to_config"}


def test_glossary_finds_what_the_style_leaves_out() -> None:
    glossary = script("glossary")
    text = "Nobody is told.\nThere is no file, `is no file`.\n\n```python\nasked = 1\n```\n\nA loader of its own is no list."
    assert [(line, words) for line, words, _ in glossary.findings(text)] == [
        (1, "Nobody"),
        (8, "of its own"),
        (8, "is no list"),
        (1, "told"),
    ]


def test_glossary_reads_messages_comments_and_titles() -> None:
    glossary = script("glossary")
    code = 'raise ValueError(f"{name!r} is no {kind}")  # Nobody reads it\nx = "told"  # the ranks are asked by name, `asked`'
    found = [words for text in glossary.prose(code) for _, words, _ in glossary.findings(text)]
    assert sorted(found) == ["Nobody", "asked", "is no x", "told"]
    assert [words for _, words, _ in glossary.findings("# Where it all goes")] == ["# Where it all goes"]
    assert not list(glossary.findings("# Custom metric\n\nWhat this tells apart is no longer than a line."))


def test_no_page_and_no_docstring_has_a_word_of_the_glossary() -> None:
    glossary = script("glossary")
    assert not [(str(path.relative_to(ROOT)), *found) for path in glossary.pages() for found in glossary.in_file(path)]


def test_what_is_made_from_the_code_is_as_the_code_is() -> None:
    assert not script("generate").differing(), "run `make names`"


def test_format_changes_no_file_of_a_commit(tmp_path: Path) -> None:
    for name in ("nbs", "nbtrain", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.ckpt", "*.pt", "*.webp", "*.png"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs = Path(sys.executable).parent
    subprocess.run([programs / "ruff", "format", "--quiet", "nbs", "nbtrain", "tests", "docs"], cwd=tmp_path, check=True)
    subprocess.run([programs / "nbdev-clean"], cwd=tmp_path, check=True)
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".py", ".ipynb", ".md")]
    assert len(files) > 900 and not [path for path in files if path.read_bytes() != (ROOT / path.relative_to(tmp_path)).read_bytes()]


def test_format_exports_the_notebooks_that_have_changed(tmp_path: Path) -> None:
    for i, name in enumerate(("older", "newer", "new")):
        notebook, module = tmp_path / "nbs" / f"{name}.ipynb", tmp_path / "nbtrain" / f"{name}.py"
        notebook.parent.mkdir(exist_ok=True)
        module.parent.mkdir(exist_ok=True)
        notebook.write_text(f'"#| default_exp {name}"')
        if name != "new":
            module.touch()
            os.utime(module, (100 - i, 100 - i))
            os.utime(notebook, (99.5, 99.5))
    assert [path.stem for path in script("form").changed(tmp_path)] == ["new", "newer"]


def test_every_library_has_a_table_of_names() -> None:
    make = script("make_coming_from")
    text = "".join(path.read_text(encoding="utf-8") for path in make.PAGES)
    assert sorted(re.findall(r"^<!-- names of (\w+),", text, re.M)) == sorted(make.LIBRARIES)


def test_the_twenty_calls_are_twenty_and_are_there() -> None:
    page = (DOCS / "life_of_a_step.md").read_text(encoding="utf-8").partition("## Twenty calls")[2]
    calls = re.findall(r"^\| `([\w.]+)", page, re.M)
    assert len(calls) == 20
    known = {"trainer": nbtrain.Trainer, "Digits": nbtrain.Trainer}
    names = [(known[owner], name.partition(".")[0]) for owner, _, name in (call.partition(".") for call in calls)]
    assert not [name for kind, name in names if not hasattr(kind, name)]


def test_every_tip_is_in_the_faq() -> None:
    tips = ["has not improved since", "overfitting since", "has been constant since", "is not falling", "waits for data", "is idle, and"]
    tips += ["the loss jumped to", "shows why"]
    code, faq = (ROOT / "nbtrain" / "views" / "advice.py").read_text(encoding="utf-8"), (DOCS / "faq.md").read_text(encoding="utf-8")
    assert not [tip for tip in tips if tip not in code or tip not in faq] and len(tips) == faq.count("\n| ", *_tips_table(faq)) - 2


def _tips_table(text: str) -> tuple[int, int]:
    begin = text.index("## What do the tips")
    return begin, text.index("\n## ", begin + 3)
