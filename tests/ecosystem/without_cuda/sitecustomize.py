"""torchvision from PyPI is built for CUDA, and can't be imported beside a torch for CPUs: it expects its operator `nms` to be there.

On the path of a process, this declares the operator where torchvision's own library can't be loaded. All of torchvision works then but the
operators, which raise torchvision's error: boxes are not suppressed, so a detector trains and does not predict.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

KEPT = []  # a library that were freed would take its operators with it


class Declaring:
    """A finder that finds nothing, and sees that torchvision is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(Declaring)
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.origin is not None:
                declare(Path(spec.origin).with_name("_C.so"))


def declare(library):
    import torch

    try:
        torch.ops.load_library(str(library))
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(operators)


sys.meta_path.insert(0, Declaring)
