"""Events of a short run, for the tests of views."""

from __future__ import annotations

from typing import Any

from nbtrain.events import Event, Progress

HEADER = {
    "title": "Digits", "model": "SmallCNN", "n_params": 12_345, "device": "cpu", "precision": None,
    "monitor": "val_loss", "monitor_mode": "min", "best": None, "n_train_batches": 4, "n_valid_batches": 2,
}  # fmt: skip


def row(epoch: int, loss: float, val_loss: float) -> dict[str, Any]:
    return {"epoch": epoch, "step": 4 * epoch, "processed": 6 * epoch, "train_loss": loss, "val_loss": val_loss, "lr": 1e-3, "time_s": 1.5}


def run_events(val_losses: tuple[float, ...] = (0.5, 0.4, 0.45), status: str = "completed", reason: str = "") -> list[Event]:
    """A run of four training and two validation batches an epoch, 1.5 s each epoch."""
    n, events = len(val_losses), [Event("start", Progress(n_epochs=len(val_losses)), 0.0, HEADER)]
    for epoch, val_loss in enumerate(val_losses):
        at, s, n_before = {"epoch": epoch, "n_epochs": n, "step": 4 * epoch + 4}, 1.5 * epoch, 6 * epoch
        train = {"values": {"train_loss": [0.5] * 4}, "n": 4, "samples": 128, "lr": 1e-3}
        valid = {"values": {"val_loss": [val_loss] * 2}, "n": 2, "samples": 64, "lr": 1e-3}
        events += [
            Event("steps", Progress(phase="train", batch=4, n_batches=4, processed=n_before + 4, elapsed_s=s + 1, **at), s + 1, train),
            Event("steps", Progress(phase="valid", batch=2, n_batches=2, processed=n_before + 6, elapsed_s=s + 1.5, **at), s + 1.5, valid),
            Event("epoch", Progress(epoch=epoch + 1, n_epochs=n, elapsed_s=s + 1.5), s + 1.5, {"row": row(epoch + 1, 0.5, val_loss)}),
        ]
    end = Progress(epoch=n, n_epochs=n, elapsed_s=1.5 * n)
    return [*events, Event("end", end, 1.5 * n, {"status": status, "reason": reason})]
