"""What a training step costs in a Jupyter kernel, live view included.

The kernel's own threads, which send the view's messages, are in its CPU time. Each duel has a kernel; a client reads its outputs as a
frontend would.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import contenders
import nbformat
from measure import Duel, Outcome, chosen, play
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tables import DUEL_COLUMNS, Table, by_ratio, duel_row, less_than, main, ratios
from workload import Sample

OURS = Duel("nbtrain", contenders.ours, max_over_us=40)
PEERS = [Duel("Lightning", contenders.lightning, every=3), Duel("plain loop + tqdm", contenders.plain_tqdm, every=3)]

SETUP = """
import json, sys, tempfile, warnings
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, {here!r})
import torch, kernel, measure, workload
warnings.simplefilter("ignore")
torch.set_num_threads(1)
folder = tempfile.TemporaryDirectory()
job = workload.Job(Path(folder.name))
(duel,) = measure.chosen([kernel.OURS, *kernel.PEERS], {{{name!r}}})
weights = measure.same_work(duel, job)
"""


class Kernel:
    """A kernel for one duel, as `measure.Process` is a process. Raises RuntimeError where a cell fails."""

    def __init__(self, duel: Duel, terminal: str) -> None:
        self._client = NotebookClient(
            nbformat.v4.new_notebook(), timeout=600, store_widget_state=False, extra_arguments=["--log-level=ERROR"]
        )
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._client.setup_kernel())
        try:
            self._execute(SETUP.format(here=str(Path(__file__).parent), name=duel.name))
            self.weights: str = self._value("weights")
        except CellExecutionError as error:
            self.close()
            raise RuntimeError(f"{error.ename}: {error.evalue}") from None

    def play(self, i: int) -> tuple[Sample, Sample]:
        self._execute(f"played = measure.one_round(duel, job, {i})")  # a cell of its own: what it shows is the live view
        base, tool = self._value("list(map(asdict, played))")
        return Sample(**base), Sample(**tool)

    def _execute(self, source: str) -> Any:
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells = [cell]
        return self._client.execute_cell(cell, 0)

    def _value(self, expression: str) -> Any:
        return json.loads(self._execute(f"print(json.dumps({expression}))").outputs[0].text)

    def close(self) -> None:
        self._stack.close()


def shown(outcomes: list[Outcome]) -> Table:
    lightning = next((outcome for outcome in outcomes if outcome.duel.name == "Lightning"), None)
    rows = tuple(duel_row(outcome, less_than(outcome, lightning, 50) if outcome.duel is OURS else ()) for outcome in by_ratio(outcomes))
    found = ratios(outcomes, "nbtrain", "plain loop + tqdm", "Lightning")
    says = f"How long a training step takes in a notebook, live view included, beside a plain loop without any: {found}."
    return Table("A training step in a notebook", DUEL_COLUMNS, rows, says=says)


def table(n_rounds: int, only: set[str]) -> Table:
    return shown(play(chosen([OURS, *PEERS], only), n_rounds, Kernel))


if __name__ == "__main__":
    main(table, 7)
