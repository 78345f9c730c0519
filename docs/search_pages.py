"""What the search of the site knows: pages with their kind, title, headings, a line, what people call them, and text, as one script.

`conf.py` hands over each page as Sphinx has read it; `style/search.js` ranks. A script needs no request, so the search also works
where the site is opened from a disk.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import snowballstemmer
import yaml
from docutils import nodes

WORDS = Path(__file__).parent / "search_words.yaml"
Kind = Literal["How-to", "Reference", "Tutorial", "Chapter", "Page"]
KINDS: dict[str, tuple[Kind, int]] = {  # of pages whose name begins so, the longest one counts; how many characters of text are kept
    "nbs/howto/": ("How-to", 4000),
    "nbs/tutorials/": ("Tutorial", 5000),
    "nbs/examples/": ("Tutorial", 2000),
    "docs/reference/": ("Reference", 2500),
    "docs/hooks": ("Reference", 2500),
    "docs/error": ("Reference", 2500),
    "nbs/": ("Chapter", 2000),
    "nbs/index.ko": ("Page", 2000),
    "": ("Page", 3000),
}
LISTS = ("index",)  # pages that name all others
_SPLIT = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
_PLURAL = re.compile(r"^([cgtx]pu)s$")
_stemmer = snowballstemmer.stemmer("english")


@cache
def _stem(word: str) -> str:
    return _stemmer.stemWord(_PLURAL.sub(r"\1", word))  # which takes GPUs for Latin


def kind_of(page: str) -> tuple[Kind, int]:
    """The kind of a page by its name, and how many characters of each of its parts are searched."""
    return next(kind for start, kind in sorted(KINDS.items(), reverse=True) if page.startswith(start))


def stems(text: str) -> set[str]:
    """The stems of the words of a text; `EarlyStoppingAddon` has three, and itself."""
    words = _SPLIT.findall(text)
    return {_stem(part.lower()) for word in words for part in (word, *_CAMEL.split(word))}


@cache
def said() -> dict[str, dict[str, str]]:
    """What people say: other `spellings` of words, and words that mean those of our `titles`."""
    return yaml.safe_load(WORDS.read_text(encoding="utf-8"))


def words_for(title: str) -> str:
    """What people say for the words of a title."""
    found = stems(title)
    return ", ".join(words for key, words in said()["titles"].items() if stems(key) <= found)


class _Part:
    """A page, or one of the parts of a page that people search for by its title."""

    def __init__(self, title: str, address: str) -> None:
        self.title, self.address = title, address
        self.text: list[str] = []
        self.code: list[str] = []
        self.headings: list[tuple[str, str]] = []

    def add(self, node: nodes.Node) -> None:
        """Add the text below `node`; what cells have printed is left out."""
        for child in node.children:
            if isinstance(child, nodes.literal_block):
                self.code.append(child.astext())
            elif isinstance(child, nodes.section):
                self.headings.append((child[0].astext(), child["ids"][0]))
                self.add(child)
            elif isinstance(child, nodes.TextElement):
                self.text += [] if isinstance(child, (nodes.title, nodes.raw)) else [child.astext()]
            elif not (isinstance(child, nodes.container) and "cell_output" in child["classes"]):
                self.add(child)

    def record(self, kind: str, limit: int) -> dict[str, Any]:
        text = " ".join(" ".join(self.text).split())
        names = dict.fromkeys(word for word in re.findall(r"[A-Za-z_]\w{2,}", " ".join(self.code)) if word not in text)
        found = {
            "address": self.address,
            "kind": kind,
            "title": self.title,
            "headings": [list(heading) for heading in self.headings],
            "words": words_for(self.title),
            "text": text[:limit],
            "code": " ".join(names)[: limit // 2],
        }
        return {name: value for name, value in found.items() if value}


def records(page: str, title: str, document: nodes.document) -> list[dict[str, Any]]:
    """What is searched of a page: the page, and on a page of text each of its parts."""
    kind, limit = kind_of(page)
    whole = _Part(title, f"{page}.html")
    top = next((node for node in document.children if isinstance(node, nodes.section)), document)
    whole.add(top)
    first = whole.record(kind, limit)
    line = next((meta["content"] for meta in document.findall(nodes.meta) if meta.get("name") == "description"), "")
    made = [first | {"line": line, "list": page in LISTS or page.endswith("/index")}]
    if page.startswith("docs/") and page not in LISTS and not page.endswith("/index"):
        for section in top.findall(lambda node: isinstance(node, nodes.section) and node.parent is top):
            part = _Part(section[0].astext(), f"{page}.html#{section['ids'][0]}")
            part.add(section)
            made.append(part.record(kind, limit) | {"page": title})
    return made


def script(found: list[dict[str, Any]]) -> str:
    """All records as a script, a line each, after the spellings."""
    spellings = {other: word for word, others in said()["spellings"].items() for other in others.split(", ")}
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in found]
    return f"window.nbtrainSpellings = {json.dumps(spellings)};\nwindow.nbtrainPages = [\n" + ",\n".join(lines) + "\n];\n"
