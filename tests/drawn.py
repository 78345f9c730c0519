"""A drawing as its parts: what tests of pictures look at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

WIDTH = 6.5  # px a character


@dataclass(frozen=True)
class Text:
    """A label with the box it takes."""

    text: str
    left: float
    right: float
    baseline: float
    kind: str

    def overlaps(self, other: Text) -> bool:
        return self.left < other.right and other.left < self.right and abs(self.baseline - other.baseline) < 10


class Drawing:
    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg)
        self.width, self.height = map(float, self.root.attrib["viewBox"].split()[2:])

    def parts(self, tag: str) -> list[Any]:
        return list(self.root.iter("{http://www.w3.org/2000/svg}" + tag))

    @property
    def texts(self) -> list[Text]:
        found = []
        for part in self.parts("text"):
            text, x, anchor = part.text or "", float(part.attrib["x"]), part.attrib.get("text-anchor", "start")
            width = WIDTH * len(text)
            left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
            found.append(Text(text, left, left + width, float(part.attrib["y"]), part.attrib.get("class", "")))
        return found

    def words(self, kind: str | None = None) -> list[str]:
        return [text.text for text in self.texts if kind is None or text.kind == kind]

    def points(self, kind: str) -> list[tuple[float, float]]:
        """The points of all lines of this kind."""
        paths = [part.attrib["d"] for part in self.parts("path") if part.attrib["class"] == kind]
        return [(float(x), float(y)) for path in paths for x, y in re.findall(r"[ML](\S+?) ([\d.-]+)", path)]

    @property
    def places(self) -> list[tuple[float, float]]:
        """Every coordinate of a line, a dot or a rectangle."""
        lines = [point for part in self.parts("path") for point in self.points(part.attrib["class"])]
        dots = [(float(part.attrib["cx"]), float(part.attrib["cy"])) for part in self.parts("circle")]
        return lines + dots + [(float(part.attrib["x"]), float(part.attrib["y"])) for part in self.parts("rect")]

    def check(self) -> None:
        """All lies inside, and no text stands on another."""
        assert all(-0.05 <= x <= self.width and -0.05 <= y <= self.height for x, y in self.places)
        texts = self.texts
        assert all(text.left >= -0.05 and text.right <= self.width + 0.05 and 8 <= text.baseline <= self.height for text in texts), texts
        assert not [(a, b) for i, a in enumerate(texts) for b in texts[:i] if a.overlaps(b)]
