"""Kernels that have imported the large packages when they start: each is a fork of one process that has.

`python warm_kernels.py SOCKET` is that process. `python warm_kernels.py SOCKET ARGUMENT...` stands for a kernel with these arguments: what
is done to it is done to the fork. The package itself is not imported before the fork, so a notebook begins as in any kernel.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import socketserver
import sys
import threading
from pathlib import Path

_MODULES = ("lightning.pytorch", "torchmetrics", "matplotlib.pyplot", "ipywidgets", "ipykernel.kernelapp", "pandas", "torch.optim")


class _Fork(socketserver.StreamRequestHandler):
    """In the fork: a kernel, until the process that stands for it ends."""

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        os.setsid()
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        self.wfile.write(f"{os.getpid()}\n".encode())
        threading.Thread(target=self._end_with_it, daemon=True).start()
        application = importlib.import_module("ipykernel.kernelapp").IPKernelApp
        sys.argv = ["ipykernel_launcher.py", *asked["arguments"]]
        application.launch_instance()
        atexit._run_exitfuncs()
        os._exit(0)  # closing the files of this request would wait for the thread that reads

    def _end_with_it(self) -> None:
        self.rfile.read()
        os._exit(1)


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 100


def _serve(path: str) -> None:
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # a kernel sets it, and matplotlib reads it when it is imported
    for name in _MODULES:
        importlib.import_module(name)
    sys.path.append(str(Path(sys.prefix) / "transformers"))
    with _Server(path, _Fork) as server:
        server.serve_forever(poll_interval=0.05)


def _stand_for(path: str, arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}  # the fork has another parent
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for commands such as `nbtrain`
    asked = {"folder": str(Path.cwd()), "environment": environment, "arguments": arguments}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(asked).encode() + b"\n")
        with connection.makefile() as answers:
            pid = int(answers.readline())
            signal.signal(signal.SIGINT, lambda *_: os.kill(pid, signal.SIGINT))
            answers.read()  # until it has ended


if __name__ == "__main__":
    socket_path, *kernel_arguments = sys.argv[1:]
    if kernel_arguments:
        _stand_for(socket_path, kernel_arguments)
    else:
        _serve(socket_path)
