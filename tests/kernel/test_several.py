"""Two processes train what is defined in cells, and in a script: the example of zae-engine's document, on the CPU."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel
from test_kernel import execute

EXAMPLE = """
import torch
from torch.utils.data import Dataset, DataLoader
import torch.nn as nn
import torch.optim as optim
from nbtrain import MultiGPUAddon, Trainer

class DummyDataset(Dataset):
    def __init__(self, size):
        self.data = torch.rand(size, 10)
        self.labels = (self.data.mean(dim=1) > 0.5).long()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return self.data[idx], self.labels[idx]

class MultiGPUTrainer(Trainer.add_on(MultiGPUAddon)):
    def train_step(self, batch):
        data, labels = batch
        outputs = self.model(data)
        loss = nn.CrossEntropyLoss()(outputs, labels)
        return {'loss': loss}

    def test_step(self, batch):
        return self.train_step(batch)

def main():
    device_list = [torch.device("cpu")] * 2
    dataset = DummyDataset(1000)
    train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model = nn.Linear(10, 2)
    optimizer = optim.Adam(model.parameters(), lr=0.001)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    trainer = MultiGPUTrainer(
        model=model,
        device=device_list,
        mode='train',
        optimizer=optimizer,
        scheduler=scheduler,
    )
    before = model.weight.detach().clone()
    trainer.run(n_epoch=2, loader=train_loader)
    print("moved:", not torch.equal(before, model.weight), "keys:", list(model.state_dict()))
"""

RAISING = """
class Broken(MultiGPUTrainer):
    def train_step(self, batch):
        print("a step of rank", self.module.global_rank)
        if self.module.global_rank == 1:
            raise LookupError("not in rank 1")
        return super().train_step(batch)

trainer = Broken(nn.Linear(10, 2), device=["cpu", "cpu"], optimizer=lambda p: optim.Adam(p))
trainer.run(1, DataLoader(DummyDataset(100), 8))
"""


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_cells_run_in_two_processes_after_openmp_was_used_and_their_lines_are_in_errors() -> None:
    openmp = "torch.set_num_threads(2); (torch.rand(2000, 2000) @ torch.rand(2000, 2000)).sum();"
    notebook = execute(EXAMPLE, openmp, "main()", "main()", RAISING)
    for cell in notebook.cells[2:4]:
        assert text_of(cell) == "moved: True keys: ['weight', 'bias']\n"
        record = next(output for output in cell.outputs if output.output_type == "display_data")
        assert "MultiGPUTrainer · Linear · 22 params · 2 × cpu · run 1" in record.data["text/plain"]
    failed = notebook.cells[4]
    assert text_of(failed) == "a step of rank 0\n"
    error = failed.outputs[-1]
    assert error.ename == "LookupError" and 'raise LookupError("not in rank 1")' in "\n".join(error.traceback)
    assert "Rank 1 raised LookupError: not in rank 1" in "\n".join(error.traceback)


def test_script_runs_in_two_processes_and_leaves_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXAMPLE + "\n\nif __name__ == '__main__':\n    main()\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert ended.stderr == "" and ended.stdout.startswith("MultiGPUTrainer · Linear · 22 params · 2 × cpu · run 1\nepoch 1/2 · train_loss ")
    assert ended.stdout.endswith("moved: True keys: ['weight', 'bias']\n")


def test_killed_kernel_takes_its_workers_along() -> None:
    manager, client = start_new_kernel()
    pids: list[int] = []
    endless = "\nclass Endless(MultiGPUTrainer):\n    def train_step(self, batch):\n        import os\n        print('pid', os.getpid())\n"
    endless += "        return super().train_step(batch)\n"
    endless += "Endless(nn.Linear(10, 2), device=['cpu', 'cpu'], optimizer=lambda p: optim.Adam(p), log_bar=False)"
    endless += ".run(10**6, DataLoader(DummyDataset(100), 8))"
    client.execute(EXAMPLE + endless)
    while not pids:
        content = client.get_iopub_msg(timeout=60)["content"]
        pids = [int(line.split()[1]) for line in content.get("text", "").splitlines() if line.startswith("pid ")]
    worker = os.pidfd_open(pids[0])
    os.kill(manager.provisioner.pid, signal.SIGKILL)  # type: ignore[union-attr]
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    ended = select.select([worker], [], [], 5)[0]
    os.close(worker)
    assert ended
