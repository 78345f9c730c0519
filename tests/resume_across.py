"""Jobs that one package saves at a random batch and another resumes: they end as those that were never cut off, in all that can be seen.

    python tests/resume_across.py 300            # in `make compare`; the seeds 0 to 299
    python tests/resume_across.py 1 --seed 17    # one of them again, with its settings and the first difference

The one package is that of this tree, the other `nbtrain_before`, as it was at an earlier commit. Each job is done to its end by either of
them, and once cut off by either and resumed by the other. Equal must be the weights, the optimizer's state, the schedules, the history's
rows, the batches that the steps see, what a logger gets at which step, the counters of Lightning's loops after each batch and in the last
state, and the random numbers.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import before
from across_job import LOADERS, OPTIMIZERS, SCHEDULES, WHO

USUAL: dict[str, Any] = {
    "who": "one optimizer",
    "net": "plain",
    "optimizer": "momentum",
    "schedule": "none",
    "loader": "shuffled",
    "n": 40,
    "size": 8,
    "none": False,
    "skips": None,
    "valid": "in order",
    "accumulate": 1,
    "limits": {},
    "early stopping": None,
    "averages": None,
    "clip": 0.0,
    "log every": 1,
    "every": 1,
    "validates on save": False,
    "n_epoch": 3,
    "how": "error",
    "at": 0.5,
}


def draw(seed: int) -> dict[str, Any]:
    """The settings of one job: plain values that say all of it."""
    rng = random.Random(seed)
    rare = lambda share, values: rng.choice(values) if rng.random() < share else None  # noqa: E731
    settings: dict[str, Any] = {
        "who": rng.choice([WHO[0], *WHO]),
        "net": rng.choice(["plain", "dropout", "batch norm"]),
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "schedule": rng.choice(["none", *SCHEDULES]),
        "loader": rng.choice(list(LOADERS)),
        "n": rng.choice([40, 52, 38]),  # no last batch of one row, which batch norm refuses
        "size": rng.choice([8, 8, 12]),
        "none": rng.random() < 0.25,
        "skips": rare(0.4, ["train", "train", "valid", "both"]),
        "valid": rng.choice(["none", "in order", "in order", "shuffled"]),
        "accumulate": rare(0.6, [2, 3, 4, {"0": 1, "3": 2, "6": 3}]) or 1,
        "limits": {
            "val_every_n_steps": rare(0.4, [1, 2, 3, 4]),
            "val_every_n_epochs": rare(0.2, [1, 2]),
            "max_steps": rare(0.15, [5, 8, 11]),
            "steps_per_epoch": rare(0.15, [3, 4]),
            "max_val_steps": rare(0.1, [1]),
            "val_first": rare(0.1, [True]),
        },
        "early stopping": rare(0.35, ["nbtrain", "Lightning"]),
        "averages": rare(0.35, ["SWA", "SWA", "EMA"]),
        "clip": rare(0.3, [0.05]) or 0.0,
        "log every": rng.choice([1, 2, 3]),
        "every": rng.choice([1, 1, 2, 3]),
        "validates on save": rng.random() < 0.1,
        "n_epoch": rng.choice([3, 4]),
        "how": rng.choice(["error", "error", "stop", "should_stop"]),
        "at": round(rng.random(), 2),  # of its batches
    }
    return _fitting(settings)


def _fitting(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without what can't be had together."""
    limits = {name: value for name, value in settings["limits"].items() if value is not None}
    if settings["valid"] == "none":
        limits = {name: value for name, value in limits.items() if not name.startswith("val_")}
        settings |= {"validates on save": False}
    if settings["loader"] == "of tensors":  # it has no collate function
        settings |= {"none": False}
    if settings["who"] != "one optimizer":
        settings |= {"accumulate": 1}
    if settings["who"] == "by hand" and settings["averages"] == "SWA":  # the package before counts its pass for batch norm backwards
        settings |= {"averages": "EMA"}
    if settings["schedule"] == "each batch" and (settings["who"] == "by hand" or settings["accumulate"] != 1):
        settings |= {"schedule": "none"}  # now it steps once an update; the package before steps it at each batch of a window
    return settings | {"limits": limits}


# -- comparison
class Packages:
    """The two packages, each in a process that does many jobs."""

    def __init__(self, before_commit: str = before.BEFORE) -> None:
        folders = {"before": before.folder_of(before_commit), "now": before.ROOT}
        self._processes = {name: before.Process(folder, "across_job", "life") for name, folder in folders.items()}

    def __enter__(self) -> Packages:
        return self

    def __exit__(self, *args: object) -> None:
        for process in self._processes.values():
            process.close()

    def lives(self, settings: dict[str, Any], folders: dict[str, Path], end: dict[str, Any] | None) -> dict[str, Any]:
        """One life of a job by each package, in its folder, at the same time."""
        for name, folder in folders.items():
            self._processes[name].begin(settings, str(folder), end)
        return {name: self._processes[name].result() for name in folders}


def difference(settings: dict[str, Any], packages: Packages) -> tuple[str, str]:
    """What differs first, empty where nothing does; and why less was compared: an error of the whole job, or a fault of a resume before.

    Where the package before does not resume its own state exactly, that of this tree may do it better, or end in the same way.
    """
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        whole = packages.lives(settings, {"before": root / "whole before", "now": root / "whole now"}, None)
        expected = whole["before"]
        if expected["error"] and expected["error"] == whole["now"]["error"]:  # what is left after it may differ
            return "", expected["error"]
        if text := first_difference(expected, whole["now"]):
            return f"not cut off: now{text}", ""
        n_batches = len(expected["told"]["batches"])
        first = 2 if settings["how"] == "error" else 1  # a run that fails in its first batch has not begun
        end = {"how": settings["how"], "at": max(first, 1 + int(settings["at"] * (n_batches - 1)))}
        cut = packages.lives(settings, {"before": root / "cut before", "now": root / "cut now"}, end)
        shutil.copytree(root / "cut before", root / "usual", symlinks=True)
        rest = packages.lives(settings, {"before": root / "cut now", "now": root / "cut before"}, None)
        usual = packages.lives(settings, {"before": root / "usual"}, None)["before"]
    # A resume restores the counters that something depends on, and no others: what they are in the end is seen with one package
    expected["outcome"]["loops"] = usual["outcome"]["loops"]
    fault = _resumed_difference(expected, cut["before"], usual)
    for life in (expected, usual, *rest.values()) if fault else ():
        life["outcome"].pop("loops", None)  # what is expected of them was counted by the package with the fault
    for first, second in (("before", "now"), ("now", "before")):
        text = _resumed_difference(expected, cut[first], rest[second])
        if text and (not fault or first_difference(usual, rest[second])):
            return f"saved {first}, resumed {second}: {text}", fault
    return "", fault


def _resumed_difference(expected: dict[str, Any], cut: dict[str, Any], rest: dict[str, Any]) -> str:
    """Where a job that was cut off differs from the whole one: what was told before is its beginning, what was told after its end."""
    for name, whole in expected["told"].items():
        head, tail = cut["told"][name], rest["told"][name]
        if len(head) + len(tail) < len(whole):
            return f"{name}: {len(whole)} in the whole job, {len(head)} before the cut and {len(tail)} after it"
        n_until_cut = cut["n_until_cut"][name]  # behind that a stop may validate
        if text := first_difference(whole[:n_until_cut], head[:n_until_cut]):
            return f"before the cut, {name}{text}"
        if text := first_difference(whole[len(whole) - len(tail) :], tail):
            return f"after the cut, {name}{text}"
    for name in ("error", *(["status"] if rest["told"]["batches"] else []), "outcome"):
        if text := first_difference(expected.get(name), rest.get(name)):
            return f"{name}{text}"
    return ""


def first_difference(expected: Any, found: Any) -> str:
    """The place of the first difference, and both values there; empty where there is none."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [*expected, *(name for name in found if name not in expected)]
        name = next((name for name in names if name not in expected or name not in found or expected[name] != found[name]), None)
        return "" if name is None else f"[{name}]{first_difference(expected.get(name), found.get(name))}"
    if isinstance(expected, list) and isinstance(found, list):
        pairs = enumerate(zip(expected, found))
        at = next((at for at, (one, other) in pairs if one != other), None)
        if at is not None:
            return f"[{at}]{first_difference(expected[at], found[at])}"
        return "" if len(expected) == len(found) else f": {len(expected)} of them, not {len(found)}"
    return "" if expected == found else f": expected {str(expected)[:300]}\n      found {str(found)[:300]}"


def shrink(settings: dict[str, Any], packages: Packages) -> dict[str, Any]:
    """The settings with as much as possible as usual, that still make a difference."""
    for name, value in settings.items():
        if value != USUAL[name] and difference(simpler := settings | {name: USUAL[name]}, packages)[0]:
            return shrink(simpler, packages)
    return settings


def unusual(settings: dict[str, Any]) -> dict[str, Any]:
    """What is not as usual in `settings`."""
    return {name: value for name, value in settings.items() if value != USUAL[name]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--commit", default=before.BEFORE, help="of the package before")
    args = parser.parse_args()
    n_different, less = 0, Counter[str]()
    with Packages(args.commit) as packages:
        for seed in range(args.seed, args.seed + args.n):
            settings = draw(seed)
            text, why_less = difference(settings, packages)
            less[why_less.partition("\n")[0][:90]] += 1
            if text:
                settings = shrink(settings, packages)
                text, why_less = difference(settings, packages)
            if text or args.n == 1:
                print(f"seed {seed}: {unusual(settings)}\n  {text or 'no difference'}", flush=True)
                if why_less:
                    print(f"  the package before: {why_less}", flush=True)
            n_different += bool(text)
    n_compared = less.pop("", 0)
    print(f"{args.n} jobs, saved by one package and resumed by the other, {n_different} differ; {n_compared} of them compared in all.")
    print(*(f"  less of {n}, as the package before has: {why}" for why, n in less.most_common()), sep="\n")
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main())
