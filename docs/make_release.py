"""Write what else needs the address of the repository: addresses of pyproject.toml, CITATION.cff, how to install, conda-forge's recipe."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_readme  # noqa: E402
import repository  # noqa: E402

_URLS = re.compile(r'^(Repository = "[^"]+")\n(?:\w+ = ".*"\n)*', re.M)
_CITED = re.compile(r"^license: (.+)\n(?:(?:repository-code|url): .*\n)*", re.M)
_RECIPE = """# The recipe for https://github.com/conda-forge/staged-recipes, made by `make names`. The sha256 is that of the sdist on PyPI
schema_version: 1

context:
  version: "{version}"

package:
  name: nbtrain
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/n/nbtrain/nbtrain-${{{{ version }}}}.tar.gz
  sha256: SHA256

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - nbtrain = nbtrain.cli:main

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
    - setuptools >=77
  run:
    - python >=${{{{ python_min }}}}
{run}

tests:
  - python:
      imports:
        - nbtrain
      python_version: ${{{{ python_min }}}}.*
  - script:
      - nbtrain demo --epochs 1

about:
  summary: {summary}
  license: Apache-2.0
  license_file: LICENSE
  homepage: {site}
  repository: {address}
  documentation: {site}

extra:
  recipe-maintainers:
    - {owner}
"""


def recipe(address: str) -> str:
    """The recipe, with the dependencies that pyproject.toml and environment.yml have both."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = set(re.findall(r'^    "([\w-]+)', pyproject.partition("\ndependencies = [")[2].partition("\n]")[0], re.M))
    names = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    specs = [
        spec
        for spec in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
        if names.get(spec.split()[0], spec.split()[0]) in needed
    ]
    return _RECIPE.format(
        version=make_readme.version(),
        run="\n".join(f"    - {spec}" for spec in specs),
        summary=re.search(r'^description = "(.+)"$', pyproject, re.M)[1],  # type: ignore[index]
        address=address,
        site=repository.site(address),
        owner=address.split("/")[-2],
    )


def pages() -> dict[Path, str]:
    """The files as they should be."""
    address = repository.address()
    made = {ROOT / "recipe.yaml": recipe(address or "https://github.com/OWNER/nbtrain")}
    if address is None:
        return made
    site = repository.site(address)
    urls = {"Documentation": site, "Changelog": f"{address}/blob/main/CHANGELOG.md", "Issues": f"{address}/issues"}
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    started = (ROOT / "docs" / "get_started.md").read_text(encoding="utf-8")
    return made | {
        ROOT / "pyproject.toml": _URLS.sub(rf"\g<1>\n{lines}", (ROOT / "pyproject.toml").read_text(encoding="utf-8")),
        ROOT / "CITATION.cff": _CITED.sub(
            rf"license: \g<1>\nrepository-code: {address}\nurl: {site}\n", (ROOT / "CITATION.cff").read_text(encoding="utf-8")
        ),
        ROOT / "docs" / "get_started.md": repository.installed(started, address),
    }
