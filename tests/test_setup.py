"""What a newcomer installs and types: wheel, environment, the commands of README."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from programs import script

import nbtrain

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def _run(*command: object, **options: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    _run(BIN / "python", "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.mark.long
def test_distributions_are_fit_for_an_index_and_hold_the_notebooks(dist: Path) -> None:
    (wheel,), (source,) = dist.glob("nbtrain-*.whl"), dist.glob("nbtrain-*.tar.gz")
    assert _run(BIN / "python", "-m", "twine", "--no-color", "check", "--strict", wheel, source).count(": PASSED") == 2
    with tarfile.open(source) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    notebooks = {str(p.relative_to(ROOT)) for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    assert kept >= notebooks | {
        "CITATION.cff",
        "CHANGELOG.md",
        "README.md",
        "Makefile",
        "constraints.txt",
        "docs/build.py",
        "tests/samples.py",
    }
    with zipfile.ZipFile(wheel) as archive:
        kept |= set(archive.namelist())
    assert not [name for name in kept if "__pycache__" in name or ".ipynb_checkpoints" in name or name.endswith("_modidx.py")]


def _description(wheel: Path) -> str:
    """What an index shows of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return str(message_from_bytes(archive.read(name)).get_payload())


@pytest.mark.long
def test_description_of_the_wheel_has_no_address_that_leads_nowhere(dist: Path) -> None:
    (wheel,) = dist.glob("nbtrain-*.whl")
    text = _description(wheel)
    assert text.startswith("# nbtrain\n") and "trainer.run(5, train_loader, valid_loader)" in text
    addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"|\]\(([^)]*)\)', re.sub(r"```.*?```", "", text, flags=re.S))
    assert addresses and not [address for pair in addresses if not (address := "".join(pair)).startswith("https://")]


def test_pictures_of_an_index_are_those_of_the_tag_once_the_repository_has_an_address() -> None:
    repository = script("repository")
    text = script("make_readme").readme()
    filled = repository.for_an_index(text, "https://github.com/someone/nbtrain", "1.2.3")
    raw = "https://github.com/someone/nbtrain/raw/v1.2.3/"
    shown = set(re.findall(rf'{re.escape(raw)}([^")]+)', filled))
    of_readme = [path for path in (ROOT / "docs" / "images").iterdir() if path.name not in ("failed.png", "step.svg")]
    assert shown == {path.relative_to(ROOT).as_posix() for path in of_readme}
    assert filled.replace(raw, "") == text


def test_address_of_the_repository_is_read_from_one_place(tmp_path: Path) -> None:
    repository, project = script("repository"), tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "nbtrain"\n')
    assert repository.address(project) is None
    project.write_text('[project]\n[project.urls]\nRepository = "https://github.com/someone/nbtrain/"\n')
    assert repository.address(project) == "https://github.com/someone/nbtrain"
    assert repository.buttons("https://github.com/someone/nbtrain", "nbs/tutorials/gan.ipynb") == (
        "Open it in [Colab](https://colab.research.google.com/github/someone/nbtrain/blob/main/nbs/tutorials/gan.ipynb) "
        "or [Binder](https://mybinder.org/v2/gh/someone/nbtrain/main?urlpath=lab/tree/nbs/tutorials/gan.ipynb)."
    )


def test_a_release_needs_one_line_and_every_place_gets_the_address(tmp_path: Path) -> None:
    for name in ("docs", "nbs/tutorials", "nbs/index.ipynb", "nbs/index.ko.ipynb", "nbtrain/__init__.py", "pyproject.toml", "LICENSE"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    for name in ("CITATION.cff", "environment.yml"):
        shutil.copy(ROOT / name, tmp_path)
    project, address = tmp_path / "pyproject.toml", "https://github.com/Someone/nbtrain"
    project.write_text(
        re.sub(r'(# )?\[project.urls\]\n((# )?\w+ = ".*"\n)+', f'[project.urls]\nRepository = "{address}"\n', project.read_text())
    )
    write = "import make_readme, make_release\nfor made in (make_release, make_readme):\n    for path, text in made.pages().items():\n"
    write += "        path.exists() and path.read_text() == text or print(path.relative_to(make_readme.ROOT), path.write_text(text))"
    written = {line.split()[0] for line in _run(sys.executable, "-c", write, cwd=tmp_path / "docs").splitlines()}
    tutorials = {f"nbs/tutorials/{path.name}" for path in (ROOT / "nbs" / "tutorials").glob("*.ipynb") if path.stem != "index"}
    files = {"README.md", "README.ko.md", "README.pypi.md", "CITATION.cff", "pyproject.toml", "recipe.yaml", "docs/get_started.md"}
    assert written | {"docs/get_started.md"} == tutorials | files  # which has no address, so it stays once there is one
    assert not _run(sys.executable, "-c", write, cwd=tmp_path / "docs")  # a second time nothing is left to do
    assert not [name for name in written if "Someone/nbtrain" not in (tmp_path / name).read_text() and name != "docs/get_started.md"]
    readme, started = (tmp_path / "README.md").read_text(), (tmp_path / "docs" / "get_started.md").read_text()
    assert readme.split("\n\n")[1].count("[![") == 6 and f"git clone {address} && cd nbtrain\nmake demo" in readme
    assert "\npip install ." not in readme + started and "pip install nbtrain " in readme and "pip install 'nbtrain[examples]'" in started
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["repository-code"] == address
    build = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    info = tmp_path / _run(sys.executable, "-c", build, cwd=tmp_path).split()[-1]
    addresses = dict(found.split(", ") for found in message_from_bytes((info / "METADATA").read_bytes()).get_all("Project-URL", []))
    assert addresses == {
        "Repository": address,
        "Documentation": "https://someone.github.io/nbtrain",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def test_recipe_for_conda_forge_has_the_dependencies_of_the_wheel() -> None:
    from rattler import MatchSpec

    recipe = yaml.safe_load((ROOT / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == nbtrain.__version__
    specs = {MatchSpec(spec).name.normalized for spec in recipe["requirements"]["run"] if "{{" not in spec}
    names = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    needed = re.findall(
        r'^    "([\w-]+)', (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("]\n\n")[0], re.M
    )
    assert {names.get(spec, spec) for spec in specs} == set(needed)


def test_tutorial_gets_one_cell_that_installs_and_loses_it_again() -> None:
    make = script("make_readme")
    path = ROOT / "nbs" / "tutorials" / "gan.ipynb"
    plain = nbformat.reads(nbformat.writes(make.with_install_cell(nbformat.read(path, as_version=4), None)), as_version=4)
    for _ in range(2):
        filled = make.with_install_cell(nbformat.from_dict(plain), "https://github.com/someone/nbtrain")
    assert len(filled.cells) == len(plain.cells) + 1
    assert filled.cells[1].source.endswith('%pip install --quiet "nbtrain[examples] @ git+https://github.com/someone/nbtrain"')
    nbformat.validate(filled)
    again = make.with_install_cell(nbformat.from_dict(filled), None)
    assert again.cells == plain.cells
    assert "pip install" not in nbformat.writes(script("build").as_page(filled))


def test_wheel_gives_a_working_import_and_command(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("nbtrain-*.whl")
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    _run(BIN / "pip", "--python", environment / "bin" / "python", "install", "--no-deps", wheel, env=alone)
    # torch and the rest come from this environment; an editable nbtrain does not, since nested .pth files are not read
    (packages / "others.pth").write_text(str(Path(torch.__file__).parent.parent))
    code = "import nbtrain, sys; print(nbtrain.__file__, nbtrain.__version__, nbtrain.Trainer.__name__)"
    file, version, name = _run(environment / "bin" / "python", "-c", code, cwd=tmp_path, env=alone).split()
    assert Path(file).is_relative_to(environment) and name == "Trainer"
    assert _run(environment / "bin" / "nbtrain", "--version", cwd=tmp_path, env=alone) == f"nbtrain {version}\n"
    assert (packages / "nbtrain" / "py.typed").exists()
    first = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    without_extras = "import sys; sys.modules.update(sklearn=None, pandas=None)\n"
    _run(environment / "bin" / "python", "-c", without_extras + first.replace("trainer.run(5", "trainer.run(1"), cwd=tmp_path, env=alone)


def test_environment_file_is_for_conda_forge_and_parses() -> None:
    from rattler import MatchSpec

    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    names = {MatchSpec(spec).name.normalized for spec in environment["dependencies"]}
    assert {"python", "pytorch", "lightning", "torchmetrics", "ipywidgets", "matplotlib-base", "safetensors"} <= names


def test_dependencies_agree_between_pyproject_environment_and_constraints() -> None:
    from rattler import MatchSpec

    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib; the files are the same on 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=]", d)[0]: re.sub(r"^[\w-]+", "", d) for d in project["dependencies"]}
    specs = [MatchSpec(spec) for spec in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]]
    conda = {spec.name.normalized.replace("matplotlib-base", "matplotlib").replace("pytorch", "torch"): str(spec.version) for spec in specs}
    assert {name: conda[name] for name in wanted} == wanted
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert wanted.keys() <= pinned


def test_every_extra_and_group_is_pinned_and_all_has_the_extras() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib; the files are the same on 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    names = {re.split(r"[\[<>=]", wanted)[0] for found in (*extras.values(), *groups.values()) for wanted in found} - {"nbtrain"}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names <= pinned, names - pinned
    assert extras["all"] == [f"nbtrain[{','.join(sorted(extras.keys() - {'all'}))}]"]


def test_workflow_has_commands_that_exist_and_the_versions_that_are_promised() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = {target for line in lines for target in re.findall(r"^make (.+)$", line)}
    assert targets == {"test", "docs check"}
    for found in targets:
        _run("make", "--dry-run", *found.split(), cwd=ROOT)
    pyproject, table = (ROOT / "pyproject.toml").read_text(), (ROOT / "docs" / "versions.md").read_text()
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)
    assert jobs["python"]["strategy"]["matrix"]["python"] == versions == ["3.10", "3.11", "3.12", "3.13"]
    assert not [version for version in versions if f"| {version}." not in table]
    (lowest,) = [line for line in lines if "torch==" in line]
    pins = dict(re.findall(r'"([a-z]+)==([\d.]+?)(?:\.\*)?"', lowest))
    assert pins == dict(re.findall(rf'^    "({"|".join(pins)})>=([\d.]+)', pyproject, re.M)) and {"torch", "lightning"} <= pins.keys()


def test_citation_and_hooks_are_of_this_version_and_these_commands() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == nbtrain.__version__
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = {hook["entry"] for hook in local["hooks"]} | set(
        re.findall(r"^make [\w -]+?(?=  |$)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    )
    assert {"make format", "make check", "make test-fast", "make format check"} == commands
    for command in sorted(commands):
        _run(*command.split(), "--dry-run", cwd=ROOT)


def test_readme_commands() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    commands = {line.split("#")[0].strip() for block in blocks for line in block.splitlines()}
    address = script("repository").address()
    first = {"pip install nbtrain", f"git clone {address} && cd nbtrain"} if address else {"pip install ."}
    assert commands == {"make demo", "make test", "nbtrain demo", *first}
    assert "pytest" in _run("make", "--dry-run", "test", cwd=ROOT)


@pytest.mark.long  # it installs all again
def test_make_demo_trains_to_97_percent_and_does_not_install_again(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    stdout = _run("make", "demo", f"DEMO_ARGS=--save-path {tmp_path}", cwd=ROOT, env=environment)
    accuracy = re.search(r"Validation accuracy: ([\d.]+)%", stdout)
    assert accuracy is not None and float(accuracy[1]) >= 97.0
    assert "pip" not in stdout
    assert "✓ completed · 10 epochs" in stdout
    folder = tmp_path / "run-001"
    for name in ("events.jsonl", "history.csv", "curves.svg", "best.safetensors", "last.safetensors", "checkpoints"):
        assert (folder / name).stat().st_size > 0 and name in stdout
    assert str(folder) in stdout and "Next:" in stdout
    assert "★" in _run(BIN / "nbtrain", "show", tmp_path)


@pytest.mark.long
def test_demo_says_how_it_was_called_where_the_command_is_not_on_the_path(tmp_path: Path) -> None:
    python = BIN / "python"
    environment, folder = {**os.environ, "PATH": str(tmp_path)}, tmp_path / "my runs"
    stdout = _run(python, "-m", "nbtrain", "demo", "--epochs", 1, "--save-path", folder, env=environment)
    assert f"{shlex.quote(str(python))} -m nbtrain show '{folder}" in stdout


def test_readme_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks[0].strip().splitlines()) <= 24
    _run(BIN / "python", "-c", "\n".join(blocks), cwd=tmp_path)


def test_command_answers_with_exit_codes(tmp_path: Path) -> None:
    def code(*arguments: object) -> tuple[int, str]:
        done = subprocess.run([BIN / "nbtrain", *map(str, arguments)], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert code("--help")[0] == 0
    assert code("dmeo")[0] == 2
    status, stderr = code("show", tmp_path)
    assert status == 2 and stderr.startswith("nbtrain: No run was recorded in") and "Traceback" not in stderr


@pytest.mark.long
def test_the_comparison_holds_on_the_lowest_lightning() -> None:
    lowest = Path(sys.prefix) / "lowest"
    assert lowest.is_dir(), f"{lowest} is missing: make .venv/installed-dev"
    requirement = re.search(r"lightning>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert requirement is not None and f"lightning=={requirement[1]} ipykernel" in (ROOT / "Makefile").read_text()
    code = "import lightning, pytest, sys; print(lightning.__version__); sys.exit(pytest.main(sys.argv[1:]))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(lowest), str(ROOT)])
    stdout = _run(BIN / "python", "-c", code, "tests/unit/loops/test_lean_loops.py", "-n", "0", "-q", cwd=ROOT, env=environment)
    assert stdout.splitlines()[0] == requirement[1] == "2.6.4"
