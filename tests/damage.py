"""Damage to the files of a checkpoint, drawn at random."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

Place = tuple[Path, int, int]  # from one byte of a file to another


def places(checkpoint: Path) -> list[Place]:
    """The parts of a checkpoint: each file of a folder and each header of safetensors; in a zip archive headers, records and directory."""
    if checkpoint.is_dir():
        files = sorted(checkpoint.iterdir())
        headers = [(file, 0, 8 + int.from_bytes(file.read_bytes()[:8], "little")) for file in files if file.suffix == ".safetensors"]
        return headers + [(file, 0, file.stat().st_size) for file in files]
    with zipfile.ZipFile(checkpoint) as archive:
        records, directory = archive.infolist(), archive.start_dir
    found = []
    for record, end in zip(records, [*(record.header_offset for record in records[1:]), directory]):
        found += [(checkpoint, record.header_offset, record.header_offset + 30), (checkpoint, record.header_offset + 30, end)]
    of_directory = [(checkpoint, directory, checkpoint.stat().st_size)]
    return found + of_directory * len(found)  # its bits are as likely to be drawn as those of all others


def damage(at: Place, rng: random.Random) -> None:
    """Flip a bit, sometimes several, or overwrite some bytes."""
    file, first, end = at
    raw = bytearray(file.read_bytes())
    if rng.random() < 0.1:
        begin = rng.randrange(first, end)
        raw[begin : begin + 8] = rng.randbytes(8)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 5])):
        raw[rng.randrange(first, end)] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
