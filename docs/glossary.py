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
    r"\b(?:nobody|somebody|whoever)\b": "name the actor, or use the passive",
    r"\b(?:those|ones?|all|people|a person|others|users?) who\b|(?:^|[.:;] )(?-i:Who) (?![^.?!]*\?)": "name the actor: you",
    r"\bof (?:its|their) own\b": "leave it out, or 'separate', 'custom'",
    r"\bmade anew\b|\banew\b": "again, new",
    r"\bput right\b": "fix",
    r"\bat hand\b": "current",
    r"(?<!\bthere\s)\b(?:is|are|was|were) no (?!longer\b|more\b|\w+er than\b)\w+": "is not a …; must be …; expected X, got Y",
    r"(?<!\bthere\s)\b(?:is|are|was|were) (?-i:none)\b|\bthat ha(?:s|ve) none\b": "is not one of …; without one",
    r"\b(?:takes?|taken|took|taking) (?:it |them )?up\b(?! to\b)": "resume, restore",
    r"\b(?:go|goes|went|gone|going) on\b(?! (?:GitHub|the|a|your)\b)": "continue",
    r"\bbroken off\b": "interrupted",
    r"\b(?:tells?|told|heard)\b(?!(?: [\w']+){0,4} apart\b)": "notify, say, report",
    r"\b(?:asks?|asked)\b(?! the ranks?\b)": "request, call, read",
    r"\blet go\b|\blets go\b": "release",
    r"\brehears\w+": "try on one batch, probe",
    r"\bwhat it (?:raises|rests on)\b|\brests on\b": "its exceptions; what it is based on, needs, uses",
    r"\bthe moment\b|\bmoments\b": "the hook, the step, the batch, the time",
    r"\bas ever\b|\bfor good\b|\bno word of\b|\bin vain\b": "as usual; permanently; does not mention; without success",
    r"\bmust be so\b|\bbeside ours\b|\bthe very\b(?! (?:first|last|same)\b)": "say what must hold; the same, exactly the",
    r"\b(?:is|are) to be\b": "must be, will be, is",
    r"\b(?:it|that|this|is|are) (?:is )?said\b(?! (?:in|by|to)\b)": "a note says …, is reported",
    r"\bslips?\b": "typo, mistake",
}
MOODS = re.compile(r"\A# (?:What|Where|When|Which|As|Around|At|Nothing|Everything|And|The same)\b.*")  # a page's title
_FORBIDDEN = [(re.compile(pattern, re.I), instead) for pattern, instead in GLOSSARY.items()]
_FORBIDDEN.append((MOODS, "name the subject, in the words that people search for"))
_CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>", re.M | re.S)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """The line, the words and the advice for each place in a text of Markdown or a docstring."""
    plain = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    for pattern, instead in _FORBIDDEN:
        for found in pattern.finditer(plain):
            yield plain.count("\n", 0, found.start()) + 1, found[0].strip(" .:;\n"), instead


def _text(node: ast.AST) -> str | None:
    """A string; an f-string with an x for each of its fields."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "x" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def prose(source: str) -> Iterator[str]:
    """The strings and comments of a cell of Python; nothing of a cell with magics."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    strings = filter(None, map(_text, ast.walk(tree)))
    yield from (string for string in strings if "(?:" not in string)  # a pattern is no prose
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    yield from (comment.lstrip("# ") for comment in comments if not comment.startswith("#|"))


def in_file(path: Path) -> list[tuple[str, str, str]]:
    """The place, the words and the advice for each finding in a page, a module or a notebook."""
    if path.suffix == ".md":
        return [(f"{line}", words, instead) for line, words, instead in findings(path.read_text(encoding="utf-8"))]
    if path.suffix == ".py":
        source = path.read_text(encoding="utf-8")
        return [("text", words, instead) for text in prose(source) for _, words, instead in findings(text)]
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
