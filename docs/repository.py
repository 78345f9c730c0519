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


def site(repository: str) -> str:
    """Where the pages are: GitHub's host for the site that the workflow `docs` builds."""
    owner, _, name = repository.removeprefix("https://github.com/").partition("/")
    return f"https://{owner.lower()}.github.io/{name}"


def badges(repository: str) -> str:
    """The line below README's title: tests, version, pages, and the first tutorial in Colab and Binder."""
    colab, binder = _open(repository, "nbs/tutorials/first_run.ipynb")
    shown = {
        "tests": (f"{repository}/actions/workflows/test.yml/badge.svg", f"{repository}/actions/workflows/test.yml"),
        "PyPI": ("https://img.shields.io/pypi/v/nbtrain", "https://pypi.org/project/nbtrain/"),
        "conda-forge": ("https://img.shields.io/conda/vn/conda-forge/nbtrain", "https://anaconda.org/conda-forge/nbtrain"),
        "documentation": ("https://img.shields.io/badge/docs-latest-blue", site(repository)),
        "Colab": ("https://colab.research.google.com/assets/colab-badge.svg", colab),
        "Binder": ("https://mybinder.org/badge_logo.svg", binder),
    }
    return " ".join(f"[![{name}]({picture})]({page})" for name, (picture, page) in shown.items())


def installed(text: str, repository: str) -> str:
    """A text that says how to install from a clone, once there is a version to install and a repository to clone."""
    text = re.sub(r"^pip install \.( +)#.*: (.*)$", r"pip install nbtrain\1# \2", text, flags=re.M)
    text = re.sub(r"^pip install '\.\[examples\]'", "pip install 'nbtrain[examples]'", text, flags=re.M)
    return re.sub(r"^make demo ", f"git clone {repository} && cd nbtrain\nmake demo ", text, flags=re.M)


def for_an_index(readme: str, repository: str | None, version: str) -> str:
    """README for PyPI: pictures and links by the address of this version's files; without a repository it has none of them."""
    if repository is None:
        readme = _PICTURE.sub("", readme)
        return re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]+\)", r"\1", readme)
    return _RELATIVE.sub(rf"\g<1>{repository}/raw/v{version}/\g<2>", readme)


def buttons(repository: str, notebook: str) -> str:
    """Links that open a notebook of the repository, such as `nbs/tutorials/gan.ipynb`, in Colab and in Binder."""
    colab, binder = _open(repository, notebook)
    return f"Open it in [Colab]({colab}) or [Binder]({binder})."


def _open(repository: str, notebook: str) -> tuple[str, str]:
    name = repository.removeprefix("https://github.com/")
    return (
        f"https://colab.research.google.com/github/{name}/blob/main/{notebook}",
        f"https://mybinder.org/v2/gh/{name}/main?urlpath=lab/tree/{notebook}",
    )


def install_cell(repository: str) -> str:
    """The first code cell of a notebook that is opened where nbtrain is not installed."""
    return f'''# Only where nbtrain is missing, as on Colab
from importlib.util import find_spec

if find_spec("nbtrain") is None:
    %pip install --quiet "nbtrain[examples] @ git+{repository}"'''
