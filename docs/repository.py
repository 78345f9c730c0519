"""Where the repository is: `Repository` below `[project.urls]` in pyproject.toml. All that needs the address asks here."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ADDRESS = re.compile(r'^\[project\.urls\]\n(?:[^[\n].*\n)*?Repository = "([^"]+)"', re.M)
_PICTURE = re.compile(r"<picture>.*?</picture>\n*|^!\[[^]]*\]\([^)]*\)\n*", re.M | re.S)
_RELATIVE = re.compile(r'((?:src|srcset)="|\]\()(?!https?:|#)([^")]+)')


def address(pyproject: Path = ROOT / "pyproject.toml") -> str | None:
    """The address of the repository on GitHub, without a slash at its end; None as long as there is none."""
    found = _ADDRESS.search(pyproject.read_text(encoding="utf-8"))  # Python 3.10 has no tomllib
    return found[1].rstrip("/") if found else None


def for_an_index(readme: str, repository: str | None, version: str) -> str:
    """README for PyPI: pictures and links by the address of this version's files; without a repository it has none of them."""
    if repository is None:
        readme = _PICTURE.sub("", readme)
        return re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]+\)", r"\1", readme)
    return _RELATIVE.sub(rf"\g<1>{repository}/raw/v{version}/\g<2>", readme)


def buttons(repository: str, notebook: str) -> str:
    """Links that open a notebook of the repository, such as `nbs/tutorials/gan.ipynb`, in Colab and in Binder."""
    name = repository.removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{name}/blob/main/{notebook}"
    binder = f"https://mybinder.org/v2/gh/{name}/main?urlpath=lab/tree/{notebook}"
    return f"Open it in [Colab]({colab}) or [Binder]({binder})."


def install_cell(repository: str) -> str:
    """The first code cell of a notebook that is opened where nbtrain is not installed."""
    return f'''# Only where nbtrain is missing, as on Colab
from importlib.util import find_spec

if find_spec("nbtrain") is None:
    %pip install --quiet "nbtrain[examples] @ git+{repository}"'''
