"""What SECURITY.md says is about the commands that there are; and no write of the package follows a link."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbtrain
from nbtrain.cli import _parser
from nbtrain.history.run_files import open_to_append, write_whole

TEXT = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text()


def test_every_command_is_in_the_table_of_what_is_safe() -> None:
    (commands,) = [set(action.choices) for action in _parser()._actions if action.choices]
    assert set(re.findall(r"^\| `nbtrain ([\w-]+)", TEXT, re.MULTILINE)) == commands


def test_packages_that_a_configuration_may_name_are_listed() -> None:
    from nbtrain.config.trust import _TRUSTED

    packages = {name.partition(".")[0] for name in (*_TRUSTED["called"], *_TRUSTED["classes"])} - {"math"}
    assert all(re.search(rf"\b{package}\b", TEXT) for package in packages)


WAYS = {"write_text", "write_bytes", "touch", "savefig", "save_file", "copy2", "copyfile", "copytree", "symlink_to", "hardlink_to"}
WAYS |= {"to_csv", "tofile", "extractall", "truncate", "export_chrome_trace", "replace", "rename", "save"}
# By module and function, what it writes: the functions that follow no link, fresh folders of ours, and what is not a file that a user names
EXCEPTIONS = {
    ("history/run_files", "open_to_append"): "the function that appends: the system refuses a link",
    ("history/run_files", "write_whole"): "the function that writes: to a new file beside it, which replaces a link",
    ("checkpoint/atomic", "_replace"): "the same for a file or a folder that others write: `written` gives a fresh name beside it",
    ("checkpoint/atomic", "clean_leftovers"): "gives back what `_replace` has moved aside",
    ("checkpoint/atomic", "point_to"): "in `written`: the links to the best and the last checkpoint",
    ("checkpoint/files", "write_folder"): "in `written`: a checkpoint that is a folder",
    ("checkpoint/files", "_write_file"): "in `written`: a checkpoint that is a file",
    ("checkpoint/store", "go_back"): "in `written`",
    ("checkpoint/tensor_parts", "write_part"): "in `written`: the shards of a rank",
    ("checkpoint/weights", "write_safetensors"): "in `written`",
    ("checkpoint/weights", "save_weights"): "in `written`",
    ("foreign/imported", "write_run"): "in `written`",
    ("cli", "_predict"): "in `written`",
    ("jobs/notebook", "_write"): "in a temporary folder",
    ("history/run_folder", "_drop_cut_line"): "shortens events.jsonl, whose path `inside` has checked",
    ("distributed/worker", "dumps"): "to memory",
    ("views/plots", "png"): "to memory",
    ("views/shown", "_encoded"): "to memory",
    ("cli", "main"): "/dev/null",
    ("jobs/callbacks", "_handler"): "torch's profiler writes traces where a configuration says",
    ("jobs/callbacks", "export"): "the same",
    ("tools/step_profile", "profile"): "the same, where a user says: the suffix is the format",
}


def _opens_to_write(call: ast.Call, name: str) -> bool:
    """`open` in any of its forms, with a mode or flags that write, or that can't be read here."""
    if ast.unparse(call.func) == "os.open":
        return not {"O_RDONLY", "flags"} & {
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in ast.walk(call)
        }
    modes = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return name in ("open", "fdopen", "FileIO") and any(re.fullmatch(r"[rwaxbt+]{1,3}", mode) and set(mode) & set("wax+") for mode in modes)


def _writes(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a module that write a file, each with the function around it."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            of_text = name == "replace" and len(call.args) + len(call.keywords) != 1  # str.replace has two
            of_ours = name in ("replace", "rename", "save") and ast.unparse(call.func) not in OF_PATHS
            if _opens_to_write(call, name) or (name in WAYS and not of_text and not of_ours):
                yield function.name, call


OF_PATHS = {
    "temp.replace",
    "path.rename",
    "aside.rename",
    "part.replace",
    "os.replace",
    "os.rename",
    "torch.save",
    "np.save",
    "image.save",
}


def test_every_write_goes_through_a_function_that_follows_no_link() -> None:
    root = Path(nbtrain.__file__).parent
    found = {
        (path.relative_to(root).with_suffix("").as_posix(), name): ast.unparse(call)
        for path in sorted(root.rglob("*.py"))
        for name, call in _writes(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {place: call for place, call in found.items() if place not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() - found.keys() == set()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_a_user_names_replaces_a_link(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "disk", target_is_directory=True)
    other = tmp_path / "other.csv"
    if is_there:
        other.write_text("theirs")
    (tmp_path / "disk" / "mine.csv").symlink_to(other)
    write_whole(tmp_path / "folder" / "mine.csv", "mine")
    assert (tmp_path / "disk" / "mine.csv").read_text() == "mine" and not (tmp_path / "disk" / "mine.csv").is_symlink()
    assert other.exists() is is_there and (not is_there or other.read_text() == "theirs")
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["mine.csv"]


def test_a_device_is_written_to_and_a_folder_is_refused(tmp_path: Path) -> None:
    write_whole(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "x")
    with pytest.raises(OSError, match="symbolic links"):
        (tmp_path / "link").symlink_to(tmp_path / "file")
        open_to_append(tmp_path / "link")
