"""The examples of zae-engine's document with their imports and devices changed: in cells and in a script, in two processes on the CPU."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jupyter_client.manager import start_new_kernel

from nbtrain import load_run

EXAMPLE = """
import os
import pytest
import torch
from torch.utils.data import Dataset, DataLoader
import torch.nn as nn
import torch.optim as optim
from nbtrain import CosineAnnealingScheduler, MultiGPUAddon, Trainer

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
    device_list = [torch.device('cpu') for i in range(2)]
    assert len(device_list) > 1, "This script must be run with multiple GPUs available."

    dataset = DummyDataset(1000)
    train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model = nn.Linear(10, 2)
    optimizer = optim.Adam(model.parameters(), lr=0.001)
    scheduler = CosineAnnealingScheduler(optimizer=optimizer, total_iters=100)
    before = model.weight.detach().clone()

    trainer = MultiGPUTrainer(
        model=model,
        device=device_list,
        mode='train',
        optimizer=optimizer,
        scheduler=scheduler,
        init_method=os.environ.get("ADDRESS")
    )

    trainer.run(n_epoch=10, loader=train_loader)
    torch.save(model.state_dict(), 'dummy_model_mgpu.pth')
    print("Model saved as 'dummy_model_mgpu.pth'.")
    print("moved:", not torch.equal(before, model.weight), "keys:", list(model.state_dict()))
"""

ENDING = "Model saved as 'dummy_model_mgpu.pth'.\nmoved: True keys: ['weight', 'bias']\n"

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


@pytest.mark.long
def test_cells_run_in_two_processes_after_openmp_was_used_and_their_lines_are_in_errors(tmp_path: Path, execute: Any) -> None:
    openmp = f"os.chdir({str(tmp_path)!r}); "
    openmp += "torch.set_num_threads(2); (torch.rand(2000, 2000) @ torch.rand(2000, 2000)).sum();"
    notebook = execute(EXAMPLE, openmp, "main()", "main()", RAISING)
    for cell in notebook.cells[2:4]:
        assert text_of(cell) == ENDING
        _, record = (output for output in cell.outputs if output.output_type == "display_data")  # the buttons stand above
        assert "MultiGPUTrainer · Linear · 22 params · 2 × cpu · started " in record.data["text/plain"]
    failed = notebook.cells[4]
    assert text_of(failed) == "a step of rank 0\n"
    error = failed.outputs[-1]
    assert error.ename == "LookupError" and 'raise LookupError("not in rank 1")' in "\n".join(error.traceback)
    assert "nbtrain: raised in rank 1" in "\n".join(error.traceback)


@pytest.mark.long
def test_script_runs_in_two_processes_and_leaves_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXAMPLE + "\n\nif __name__ == '__main__':\n    main()\n")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"tcp://localhost:{probe.getsockname()[1]}"
    environment = os.environ | {"ADDRESS": address}
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    first = r"MultiGPUTrainer · Linear · 22 params · 2 × cpu · started \d\d:\d\d\nepoch 1/10 · train_loss "
    assert ended.stderr == "" and re.match(first, ended.stdout) and ended.stdout.endswith(ENDING)
    assert torch.load(tmp_path / "dummy_model_mgpu.pth").keys() == {"weight", "bias"}


BASIC = """
from nbtrain import StateManagerAddon, Trainer, WandBLoggerAddon

# Add StateManager and WandBLogger add-ons to Trainer
MyTrainer = Trainer.add_on(StateManagerAddon, WandBLoggerAddon)

class MyTrainer(MyTrainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": torch.nn.functional.mse_loss(self.model(x), y)}
    test_step = train_step

trainer = MyTrainer(
    model=my_model,
    device='cpu',
    mode='train',
    optimizer=my_optimizer,
    scheduler=my_scheduler,
    save_path='./checkpoints',
    web_logger={"wandb": {"project": "my_project"}},
)

trainer.run(n_epoch=10, loader=train_loader, valid_loader=valid_loader)
print(sorted(path.name for path in trainer.run_dir.iterdir()), len(list((trainer.run_dir / "checkpoints").glob("epoch=*"))))
"""


@pytest.mark.long
def test_the_basic_usage_saves_logs_and_counts(tmp_path: Path, execute: Any) -> None:
    given = """
import os, torch
os.chdir(%r)
torch.manual_seed(0)
my_model = torch.nn.Linear(4, 1)
my_optimizer = torch.optim.Adam(my_model.parameters(), lr=0.01)
my_scheduler = torch.optim.lr_scheduler.StepLR(my_optimizer, 4)
train_loader = valid_loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]
"""
    notebook = execute(given % str(tmp_path), BASIC)
    run = tmp_path / "checkpoints" / "run-001"
    assert text_of(notebook.cells[1]).endswith(f"{sorted(path.name for path in run.iterdir())} 10\n")
    assert len(load_run(run).epochs) == 10 and (run / "wandb").is_dir() and (run / "checkpoints" / "best.ckpt").exists()


@pytest.mark.long
def test_killed_kernel_takes_its_workers_along() -> None:
    manager, client = start_new_kernel()
    pids: list[int] = []
    endless = "\nclass Endless(MultiGPUTrainer):\n    def train_step(self, batch):\n        import os\n        print('pid', os.getpid())\n"
    endless += "        return super().train_step(batch)\n"
    endless += "Endless(nn.Linear(10, 2), device=['cpu', 'cpu'], optimizer=lambda p: optim.Adam(p), log_bar=False)"
    endless += ".run(10**6, DataLoader(DummyDataset(100), 8))"
    client.execute(EXAMPLE + endless)
    while not pids:
        content = client.get_iopub_msg(timeout=600)["content"]
        pids = [int(line.split()[1]) for line in content.get("text", "").splitlines() if line.startswith("pid ")]
    worker = os.pidfd_open(pids[0])
    os.kill(manager.provisioner.pid, signal.SIGKILL)  # type: ignore[union-attr]
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    ended = select.select([worker], [], [], 5)[0]
    os.close(worker)
    assert ended
