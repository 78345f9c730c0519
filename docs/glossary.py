"""List the words that our style leaves out, where people read them: `python docs/glossary.py [FILE ...]`.

Pages, cells of text, docstrings, comments and other strings of the notebooks are read; code, and what stands in backticks, is not. Each
line says the place, what was found, and what to write instead. The exit code is 1 where something was found.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = {  # what is left out, and what to write
    r"\b(?i:nobody|somebody|whoever)\b": "name the actor, or use the passive",
    r"\b[Tt]hose who\b|(?:^|[.:;] )Who (?![^.?!]*\?)": "name the actor: you, a user",
    r"\bof (?:its|their) own\b": "leave it out, or 'separate', 'custom'",
    r"\bmade anew\b|\banew\b": "again, new",
    r"\bput right\b": "fix",
    r"\bat hand\b": "current",
    r"(?<!\b[Tt]here )\b(?:is|are) no (?!longer\b|more\b)\w+": "is not a …; must be …; expected X, got Y",
    r"\b(?:takes?|taken|took) up\b": "resume, restore",
    r"\b(?:go|goes|went|gone|going) on\b(?! (?:GitHub|the|a|your)\b)": "continue",
    r"\bbroken off\b": "interrupted",
    r"\b(?:tells?|told|heard)\b": "notify, say, report",
    r"\b(?:asks?|asked)\b": "request, call, read",
    r"\blet go\b|\blets go\b": "release",
    r"\brehears\w+": "dry run, probe",
    r"\bwhat it raises\b": "its exceptions",
    r"\b[Tt]he moment\b": "the step, the batch, the time",
}
_FORBIDDEN = [(re.compile(pattern), instead) for pattern, instead in GLOSSARY.items()]
_CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>", re.M | re.S)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """The line, the words and the advice for each place in a text of Markdown or a docstring."""
    plain = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    for pattern, instead in _FORBIDDEN:
        for found in pattern.finditer(plain):
            yield plain.count("\n", 0, found.start()) + 1, found[0].strip(" .:;"), instead


def prose(source: str) -> Iterator[str]:
    """The strings and comments of a cell of Python; nothing of a cell with magics."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT and not token.string.startswith("#|"))


def in_file(path: Path) -> list[tuple[str, str, str]]:
    """The place, the words and the advice for each finding in a page or a notebook."""
    if path.suffix == ".md":
        return [(f"{line}", words, instead) for line, words, instead in findings(path.read_text(encoding="utf-8"))]
    found = []
    for n, cell in enumerate(nbformat.read(path, as_version=4).cells):
        for text in prose(cell.source) if cell.cell_type == "code" else [cell.source]:
            found += [(f"cell {n}", words, instead) for _, words, instead in findings(text)]
    return found


def pages() -> list[Path]:
    """All that people read: pages, README and notebooks, which the package is exported from."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "nbs").rglob("*.ipynb")]
    return sorted(path for path in found if ".ipynb_checkpoints" not in path.parts)


def main(arguments: list[str]) -> int:
    """Prints what is found in the files, or in all of them. Returns 1 where there is something, else 0."""
    counts: Counter[str] = Counter()
    for path in [Path(name).resolve() for name in arguments] or pages():
        for place, words, instead in in_file(path):
            counts[path.relative_to(ROOT).parts[0]] += 1
            print(f"{path.relative_to(ROOT)}:{place}: {words!r}: {instead}")
    print(f"{sum(counts.values())} in all; by folder: {dict(counts.most_common())}")
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
