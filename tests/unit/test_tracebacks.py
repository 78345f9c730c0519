"""Whose a frame is, what is hidden of a traceback, and what is kept of it."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
from samples import Regress, make_trainer

from nbtrain import ConfigError, StateManagerAddon, tracebacks
from nbtrain.annotations import checked
from nbtrain.completion import Listed
from nbtrain.remote_errors import RemoteTraceback
from nbtrain.tracebacks import TracebackKeeper, hidden_line, keep_traceback, kept_traceback, library_of, render, shorten, user_frames


class Shell:
    """As much of IPython's shell as a rendering needs, which formats a line for each frame."""

    def __init__(self, n_lines: int = 1) -> None:
        self.InteractiveTB = self.compile = self
        self.n_lines, self.user_ns = n_lines, dict[str, Any]()

    def structured_traceback(self, kind: type[BaseException], error: BaseException, tb: Any, offset: int, context: int) -> list[str]:
        assert offset == 0 and error.__cause__ is None and error.__context__ is None
        frames = [f"{frame.f_code.co_name}{' .' * context}" for frame, _ in walk_tb(tb)]
        return ["-----", *("\n".join([frame] * self.n_lines) for frame in frames), f"\x1b[31m{kind.__name__}\x1b[0m: {error}"]


def names(error: BaseException) -> list[str]:
    return [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]


def raising_again(name: str) -> list[str]:
    """The frame that raises an error again: Python 3.10 leaves it in the traceback, where it is hidden when the error is shown."""
    return [name] if sys.version_info < (3, 11) else []


def load(text: str) -> object:
    """A line of the user's that calls a library."""
    import json

    return json.loads(text)


def call(function: Any, *args: Any, shell: Any = None) -> BaseException:
    """The error that a public function raises, in a shell or outside of one."""
    try:
        public(function, args, shell)
    except Exception as error:
        return error
    raise AssertionError


def public(function: Any, args: tuple[Any, ...], shell: Any) -> None:
    try:
        function(*args)
    except Exception as error:
        shorten(error, function, args, shell)
        raise


TORCH = importlib.util.find_spec("torch").origin  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (tracebacks.__file__, "nbtrain"),
        (str(Path(tracebacks.__file__).parent / "examples" / "mlp.py"), "nbtrain"),
        (TORCH, "torch"),
        (importlib.util.find_spec("lightning").origin, "Lightning"),  # type: ignore[union-attr]
        (importlib.util.find_spec("six").origin, "six"),  # type: ignore[union-attr]
        (pickle.__file__, "Python"),
        ("<frozen runpy>", "Python"),
        ("<eval_with_key>.0", "Python"),
        (__file__, ""),
        ("/tmp/ipykernel_7/123.py", ""),
        ("<ipython-input-3-0c2f>", ""),
    ],
)
def test_library_of_a_file(file: str, library: str) -> None:
    assert library_of(file) == library


def test_what_is_installed_in_a_folder_of_the_path_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # `pip install --target`, as people do on Colab's drive
    assert library_of(str(tmp_path / "lookup" / "tables.py")) == ""
    (tmp_path / "seek-1.0.dist-info").mkdir()
    tracebacks._is_target.cache_clear()
    assert library_of(str(tmp_path / "seek" / "tables.py")) == "seek" and library_of(str(tmp_path / "single.py")) == "single"


def test_hidden_line_names_nbtrain_and_lightning_first_and_python_last() -> None:
    line = hidden_line(["Python", "torch", "Lightning", "nbtrain", "torch"], "clf.traceback()")
    assert line == "[5 frames of nbtrain, Lightning, torch and Python hidden · clf.traceback() shows them]"
    assert hidden_line(["torch", "nbtrain"], "clf.traceback()") == "[2 frames of nbtrain and torch hidden · clf.traceback() shows them]"


def test_outside_of_a_shell_the_traceback_stays_whole() -> None:
    error = call(load, "{")
    assert names(error) == ["call", "public", "load", "loads", "decode", "raw_decode"] and not vars(error).keys() & {"_render_traceback_"}


def test_in_a_shell_the_frames_of_libraries_are_taken_out() -> None:
    error = call(load, "{", shell=Shell())
    assert names(error) == ["call", "public", "load"]
    kept = kept_traceback(error)
    assert kept.hidden == ["Python"] * 3
    assert render(error, kept, Shell()) == [
        "-----",
        *(f"{name} . . . . ." for name in ("call", "public", "load")),
        "[3 frames of Python hidden · nbtrain.tracebacks.print_last() shows them]",
        f"\x1b[31mJSONDecodeError\x1b[0m: {error}",
    ]


def test_wrong_argument_leaves_no_frame_of_nbtrain(monkeypatch: pytest.MonkeyPatch) -> None:
    @checked
    def wait(n: int) -> None: ...

    monkeypatch.setattr(tracebacks, "ipython_shell", Shell)
    with pytest.raises(ConfigError) as raised:
        wait("3")  # type: ignore[arg-type]
    assert names(raised.value) == ["test_wrong_argument_leaves_no_frame_of_nbtrain", *raising_again("with_check")]
    assert raised.value._render_traceback_() == [  # type: ignore[attr-defined]
        "-----",
        "test_wrong_argument_leaves_no_frame_of_nbtrain . . . . .",
        "\x1b[31mConfigError\x1b[0m: n must be an integer, got '3'.\n  Leave out the quotes: n=3.",
    ]


def test_error_of_an_addons_command_leaves_no_frame_of_nbtrain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer: Any = make_trainer(Regress.add_on(StateManagerAddon), save_path=str(tmp_path))
    monkeypatch.setattr(tracebacks, "ipython_shell", Shell)
    with pytest.raises(ConfigError) as raised:
        trainer.import_run("missing")
    lines = raised.value._render_traceback_()  # type: ignore[attr-defined]
    assert lines[:2] == ["-----", "test_error_of_an_addons_command_leaves_no_frame_of_nbtrain . . . . ."] and len(lines) == 3, lines


def test_unknown_attribute_leaves_no_frame_of_nbtrain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Listed):
        first, second = 1, 2

    monkeypatch.setattr(tracebacks, "ipython_shell", Shell)
    with pytest.raises(AttributeError) as raised:
        Two().secnod  # type: ignore[attr-defined] # noqa: B018
    assert raised.value._render_traceback_() == [  # type: ignore[attr-defined]
        "-----",
        "test_unknown_attribute_leaves_no_frame_of_nbtrain . . . . .",
        "\x1b[31mAttributeError\x1b[0m: Two has no secnod.\n  Did you mean 'second'?",
    ]


def test_only_the_outermost_function_shortens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    @checked
    def inner(n: int) -> None: ...

    @checked
    def outer(n: int) -> None:
        try:
            inner("3")  # type: ignore[arg-type]
        except ConfigError as error:
            seen.append(names(error))
            raise

    monkeypatch.setattr(tracebacks, "ipython_shell", Shell)
    with pytest.raises(ConfigError) as raised:
        outer(1)
    assert seen == [["outer", "with_check", "check_call", "check_values"]]
    assert names(raised.value) == ["test_only_the_outermost_function_shortens", *raising_again("with_check"), "outer"]


def test_shortening_twice_changes_nothing() -> None:
    error = call(load, "{", shell=Shell())
    text, hidden = kept_traceback(error).text, list(kept_traceback(error).hidden)

    def again() -> None:
        raise error

    assert call(again, shell=Shell()) is error
    assert names(error) == ["call", "public", *raising_again("public"), "load"]
    assert (kept_traceback(error).text, kept_traceback(error).hidden) == (text, hidden)


def test_too_many_lines_cost_context_and_then_frames_of_the_middle() -> None:
    error = call(load, "{", shell=Shell())
    parts = render(error, kept_traceback(error), Shell(n_lines=12))
    assert [part.split("\n")[0] for part in parts] == [
        "-----",
        "call . .",
        "load . .",
        "[3 frames of Python hidden · nbtrain.tracebacks.print_last() shows them]",
        "[1 of your frames left out]",
        f"\x1b[31mJSONDecodeError\x1b[0m: {error}",
    ]


def test_cause_in_a_library_is_left_out_and_one_of_the_user_is_shown() -> None:
    def in_library() -> None:
        try:
            load("{")
        except ValueError as cause:
            cause.__traceback__ = None
            raise RuntimeError("mine") from cause

    def by_user() -> None:
        try:
            load("{")
        except ValueError:
            raise RuntimeError("mine")  # noqa: B904  # without `from`

    error = call(by_user, shell=Shell())
    shown = render(error, kept_traceback(error), Shell())
    assert "\nDuring handling of the above exception, another exception occurred:\n" in shown and shown.count("-----") == 1
    error = call(in_library, shell=Shell())
    assert "\nThe above exception was the direct cause of the following exception:\n" in render(error, kept_traceback(error), Shell())
    error.__cause__, error.__suppress_context__ = None, False
    error.__context__ = ValueError("of a library")
    assert [part for part in render(error, kept_traceback(error), Shell()) if "above" in part] == []


def test_frozen_dataclass_is_shown_as_any_other() -> None:
    @dataclass(frozen=True)
    class Frozen(Exception):
        text: str

    def fail() -> None:
        raise Frozen("cold")

    error = call(fail, shell=Shell())
    assert render(error, kept_traceback(error), Shell())[-1].startswith("\x1b[31mFrozen\x1b[0m") and names(error) == [
        "call",
        "public",
        "fail",
    ]


def test_whole_text_is_kept_and_no_frame() -> None:
    keeper = TracebackKeeper()

    class Batch:
        pass

    def fail() -> None:
        batch = Batch()
        batches.append(weakref.ref(batch))
        raise OSError("disk")

    batches: list[Any] = []
    error: BaseException | None = call(fail)
    assert error is not None
    keep_traceback(keeper, error)
    error = None
    assert keeper.last_traceback is not None and keeper.last_traceback.text.endswith("OSError: disk\n")
    assert [batch() for batch in batches] == [None]
    assert pickle.loads(pickle.dumps(keeper.last_traceback)).text == keeper.last_traceback.text


def test_trainer_prints_the_whole_traceback_of_its_newest_error(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(Regress)
    trainer.traceback()
    with pytest.raises(ConfigError):
        trainer.set(lrr=3)
    trainer.traceback()
    nothing, _, text = capsys.readouterr().out.partition("\n")
    assert nothing == "No error so far."
    assert text.startswith("Traceback (most recent call last):\n") and text.endswith(
        "OptionError: Adam has no option 'lrr'.\n  Did you mean 'lr'?\n"
    )
    assert "    trainer.set(lrr=3)\n" in text and "live_edits.py" in text


def test_frames_of_the_user_are_those_of_both_processes() -> None:
    error = call(load, "{")
    text = 'Traceback (most recent call last):\n  File "/data/rows.py", line 3, in read\n    rows[9]\n'
    error.__cause__ = RemoteTraceback("raised", "rank 1", text + f'  File "{TORCH}", line 1, in at\n    pass\nIndexError: 9\n')
    shown = user_frames(error)
    assert "in load\n" in shown and shown.endswith('  File "/data/rows.py", line 3, in read\n    rows[9]\n') and "decode" not in shown


SCRIPT = """\
from samples import Regress, make_loader, make_trainer

class Broken(Regress):
    def train_step(self, batch):
        return {"loss": batch["x"]}

make_trainer(Broken, log_bar=False).run(1, make_loader())
"""


@pytest.mark.long
def test_script_prints_what_python_prints(tmp_path: Path) -> None:
    """`shorten` does nothing there: without it the same is printed."""
    script, printed = tmp_path / "script.py", []
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for start in ("", "import nbtrain.annotations\nnbtrain.annotations.shorten = lambda *_: None\n"):
        script.write_text(start.replace("\n", ";") + SCRIPT)
        printed.append(subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment).stderr)
    assert printed[0].replace(str(script), "") == printed[1].replace(str(script), "")
    assert "nbtrain/engine/step_module.py" in printed[0] and 'return {"loss": batch["x"]}' in printed[0]
