"""Where nobody sits at the notebook, and where there is none: papermill, nbclient as others call it, plain IPython."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient
from test_kernel import SETUP


def written(*cells: str) -> Any:
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=metadata)


def check(notebook: Any) -> None:
    """The record is all there is: the last cell has shown no widget, and the notebook keeps the state of none."""
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    (record,) = notebook.cells[-1].outputs
    assert set(record.data) == {"text/html", "text/plain"}
    assert record.data["text/html"].count('scope="row"') == 2 and "data:image/svg+xml" in record.data["text/html"]
    assert "✓ completed · 2 epochs" in record.data["text/plain"]


def test_a_notebook_that_is_executed_for_nobody_has_the_record_alone() -> None:
    notebook = written(SETUP, "result = trainer.run(2, loader, loader)")
    NotebookClient(notebook, timeout=600).execute()  # with the options that nbconvert --execute has
    check(notebook)


@pytest.mark.long
def test_a_submitted_run_is_shown_in_its_cell_before_it_begins_and_has_its_end(tmp_path: Path) -> None:
    setup = SETUP.replace("trainer = Slow", f"import os\nos.environ['XDG_STATE_HOME'] = {str(tmp_path)!r}\ntrainer = Slow")
    submit = f"handle = trainer.submit(2, loader, loader, cluster='local', save_path={str(tmp_path / 'runs')!r}, name='night')\n"
    began = "handle.show()\nfirst = handle.status\nassert first == 'starting', first"
    notebook = written(setup, submit + began, "result = handle.wait()")
    NotebookClient(notebook, timeout=600).execute()
    notebook.cells.pop()
    check(notebook)


@pytest.mark.long
def test_papermill_writes_the_record_and_its_parameters_reach_the_run(tmp_path: Path) -> None:
    notebook = written("n_epoch = 1", SETUP, "result = trainer.run(n_epoch, loader, loader)")
    notebook.cells[0].metadata.tags = ["parameters"]
    nbformat.write(notebook, tmp_path / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "in.ipynb", "out.ipynb", "-p", "n_epoch", "2"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=600)
    check(nbformat.read(tmp_path / "out.ipynb", as_version=4))


@pytest.mark.long
def test_plain_ipython_shows_a_line_pauses_at_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(SETUP)
    options = ["-m", "IPython", "--no-banner", "--simple-prompt", "--colors=NoColor", "--HistoryManager.enabled=False"]
    terminal = {"cwd": str(tmp_path), "encoding": "utf-8", "timeout": 90, "dimensions": (40, 140)}
    terminal["env"] = {name: value for name, value in os.environ.items() if name != "CI"}  # which stands for a log
    shell = pexpect.spawn(sys.executable, options, **terminal)

    def ask(line: str, *expected: str) -> None:
        shell.sendline(line)
        for text in expected:
            shell.expect(text)

    try:
        shell.expect(r"In \[1\]:")
        ask("%run -i setup.py", r"In \[2\]:")
        ask("trainer.run(20, loader, loader)", r"epoch 2/20 · \|\S* *\| \d+/200")
        shell.sendintr()
        shell.expect(r"‖ run paused at epoch \d+, (validation )?batch \d+\s+trainer.resume\(\)  # continues it, while it is paused")
        shell.expect(r"In \[3\]:")
        ask("print('kept', trainer.result.status, len(trainer.history.epochs) > 0)", "kept paused True", r"In \[4\]:")
        ask("trainer.resume()", r"epoch \d+/20")
        shell.sendintr()
        shell.expect(r"In \[5\]:")
        ask("trainer.stop().status", "Out.*stopped", r"In \[6\]:")
        ask("handle = trainer.run(1, loader, background=True)", r"In \[7\]:")
        ask("handle.wait().status", "completed", r"In \[8\]:")
        ask("exit", pexpect.EOF)  # pyright: ignore[reportArgumentType]
    finally:
        shell.close(force=True)
