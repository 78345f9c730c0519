"""Write all that is made from the code, and print what has changed: `make names`.

The reference, the tables of names and hooks, the drawing of the packages, README, and the types of the addons' options. What is
written into a notebook is exported afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import form  # noqa: E402
import make_addon_types  # noqa: E402
import make_architecture  # noqa: E402
import make_coming_from  # noqa: E402
import make_hooks  # noqa: E402
import make_readme  # noqa: E402
import make_reference  # noqa: E402
import make_release  # noqa: E402

MAKERS = (make_addon_types, make_architecture, make_coming_from, make_hooks, make_readme, make_reference, make_release)


def differing() -> dict[Path, str | None]:
    """The files that are not as the code is, as they should be; None for a page of the reference whose name is gone."""
    made = {path: text for maker in MAKERS for path, text in maker.pages().items()}
    gone = dict.fromkeys(set(make_reference.FOLDER.glob("*.md")) - made.keys())
    return {path: text for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text} | gone


if __name__ == "__main__":
    for path, text in differing().items():
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
        print("removed" if text is None else "wrote", path.relative_to(ROOT))
    form.main()
