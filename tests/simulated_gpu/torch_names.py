"""What a build of torch for CUDA, or for XPU, has in `torch._C` beside the CPU's: `torch.cuda` and `torch.xpu` run on it unchanged."""

from __future__ import annotations

import ctypes
import sys
import time
from types import SimpleNamespace
from typing import Any

DEVICES: ctypes.CDLL | None = None


def devices() -> ctypes.CDLL:
    """The C++ half of the devices. Raises RuntimeError where they were not loaded."""
    if DEVICES is None:
        raise RuntimeError("There are no simulated devices in this process: call simulated_gpu.load() before torch is imported.")
    return DEVICES


def _declare(library: ctypes.CDLL) -> None:
    def check(result: int, function: Any, arguments: Any) -> int:
        if result < 0:
            raise RuntimeError(library.simulated_error().decode())
        return result

    for function in (library.simulated_capture, library.simulated_replay):
        function.errcheck = check
    library.simulated_names.restype = library.simulated_error.restype = ctypes.c_char_p
    library.simulated_current_stream.restype = ctypes.c_int64
    library.simulated_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.simulated_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.simulated_total.argtypes = [ctypes.c_int, ctypes.c_int64]


class Properties(SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns."""

    def __init__(self, index: int) -> None:
        import torch

        total = torch._C._accelerator_getMemoryInfo(index)[1]
        super().__init__(
            name="Simulated GPU", major=9, minor=0, total_memory=total, multi_processor_count=132, warp_size=32, uuid=str(index)
        )
        self.has_fp64 = self.has_bfloat16_conversions = True


def _choose(stream_id: int, device_index: int, device_type: int) -> None:
    """Make a stream the current one of its device, and that the current one."""
    devices().simulated_set(device_index)
    devices().simulated_set_stream(device_index, stream_id)


def _streams(C: Any) -> dict[str, Any]:
    library = devices()

    class _CudaStreamBase(C.Stream):
        def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=0, stream_ptr=0):
            if stream_id or device_index or device_type:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return super().__new__(cls, device=f"cuda:{library.simulated_current()}", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class _CudaEventBase(C.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

        def record(self, *stream: Any) -> None:
            super().record(*stream)
            self._recorded = time.perf_counter()

        def elapsed_time(self, end: Any) -> float:  # torch's own refuses classes that are derived from its event
            if not (self.query() and end.query()):
                raise RuntimeError("CUDA error: device not ready")
            return 1e3 * (end._recorded - self._recorded)

    def current(index: int) -> tuple[int, int, int]:
        return library.simulated_current_stream(index), index, 1  # 1: the number of "cuda" among torch's device types

    return {
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_cuda_getCurrentStream": current,
        "_cuda_getCurrentRawStream": lambda index: library.simulated_current_stream(index),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": _choose,
        "_cuda_synchronize": lambda: C._accelerator_synchronizeDevice(library.simulated_current()),
    }


def _devices(C: Any) -> dict[str, Any]:
    library = devices()

    def start() -> None:
        cuda = sys.modules["torch.cuda"]
        library.simulated_start()
        cuda._get_device_properties = Properties
        library.simulated_adopt(1)
        cuda.default_generators = tuple(C.Generator(device=f"cuda:{i}") for i in range(library.simulated_count()))
        library.simulated_adopt(0)

    def change(index: int) -> int:
        before = library.simulated_current()
        if index >= library.simulated_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        if index >= 0:
            library.simulated_set(index)
        return before

    class Runtime:
        cudaMemGetInfo = staticmethod(C._accelerator_getMemoryInfo)

    return {
        "_has_cuda": True,
        "_cudart": Runtime(),
        "_cuda_init": start,
        "_cuda_isInBadFork": lambda: bool(library.simulated_forked()),
        "_cuda_getDeviceCount": lambda: library.simulated_count(),
        "_cuda_getDevice": lambda: library.simulated_current(),
        "_cuda_setDevice": lambda index: change(index) and None,
        "_cuda_exchangeDevice": lambda index: change(index),
        "_cuda_maybeExchangeDevice": lambda index: change(index),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_CudaDeviceProperties": Properties,
    }


def _memory(C: Any) -> dict[str, Any]:
    def limit(fraction: float, index: int) -> None:
        devices().simulated_total(index, int(fraction * C._accelerator_getMemoryInfo(index)[1]))

    return {
        "_cuda_memoryStats": lambda index: C._accelerator_getDeviceStats(index),
        "_cuda_resetPeakMemoryStats": lambda index: C._accelerator_resetPeakStats(index),
        "_cuda_resetAccumulatedMemoryStats": lambda index: C._accelerator_resetAccumulatedStats(index),
        "_cuda_emptyCache": lambda: C._accelerator_emptyCache(),
        "_cuda_setMemoryFraction": limit,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def _graphs(C: Any) -> dict[str, Any]:
    library = devices()

    class _CUDAGraph:
        """What was launched between `capture_begin` and `capture_end`, which computes nothing, and is computed by `replay`."""

        def __new__(cls, keep_graph=False):
            return super().__new__(cls)

        def __init__(self, keep_graph=False):
            self._number = None

        def capture_begin(self, pool=None, capture_error_mode="global"):
            self._number = library.simulated_capture()

        def capture_end(self):
            library.simulated_captured()

        def instantiate(self):
            pass

        def replay(self):
            library.simulated_replay(self._number)

        def reset(self):
            if self._number is not None:
                library.simulated_drop(self._number)
                self._number = None

        def pool(self):
            return 0, 0

        def __del__(self):
            self.reset()

    return {
        "_CUDAGraph": _CUDAGraph,
        "_graph_pool_handle": lambda: (0, 0),
        "_cuda_isCurrentStreamCapturing": lambda: bool(library.simulated_captures()),
        "_host_emptyCache": lambda: None,
    }


def _storages(kind: Any) -> None:
    """`torch.UntypedStorage(n, device="cuda")` and its `resize_`, which the CPU's build refuses in C++; "xpu" alike."""
    base = sys.modules["torch._C"].StorageBase
    made, resized = base.__new__, base.resize_

    def new(cls: type, *args: Any, device: Any = None, **options: Any) -> Any:
        import torch

        if device is None or torch.device(device).type == "cpu":
            return made(cls, *args, **options | ({} if device is None else {"device": device}))
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type == "cpu":
            return resized(self, size)
        devices().simulated_resize(self._cdata, size)
        return self

    kind.__new__, kind.resize_ = staticmethod(new), resize_


def _of_xpu(C: Any) -> dict[str, Any]:
    """What `torch.xpu` asks for: what CUDA has, by its names."""
    library, named = devices(), {"_CUDAGraph": "_XPUGraph", "_graph_pool_handle": "_xpu_graph_pool_handle"}
    of_cuda = _devices(C) | _memory(C) | _graphs(C)
    found = {named.get(name, name.replace("_cuda_", "_xpu_")): value for name, value in of_cuda.items()}

    def start() -> None:
        xpu = sys.modules["torch.xpu"]
        library.simulated_start()
        xpu._get_device_properties = Properties
        library.simulated_adopt(1)
        xpu.default_generators = tuple(C.Generator(device=f"xpu:{i}") for i in range(library.simulated_count()))
        library.simulated_adopt(0)

    class _XpuStreamBase(C.Stream):
        def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=0):
            if stream_id or device_index or device_type:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return super().__new__(cls, device=f"xpu:{library.simulated_current()}", priority=priority)

    class _XpuEventBase(C.Event):
        def __new__(cls, enable_timing=False):
            return super().__new__(cls, device="xpu", enable_timing=enable_timing)

    return found | {
        "_has_xpu": True,
        "_XpuDeviceProperties": Properties,
        "_XpuStreamBase": _XpuStreamBase,
        "_XpuEventBase": _XpuEventBase,
        "_xpu_init": start,
        "_xpu_getMemoryInfo": C._accelerator_getMemoryInfo,
        "_xpu_getCurrentStream": lambda index: (library.simulated_current_stream(index), index, 12),  # "xpu" among torch's device types
        "_xpu_getCurrentRawStream": lambda index: library.simulated_current_stream(index),
        "_xpu_setStream": _choose,
        "_xpu_synchronize": C._accelerator_synchronizeDevice,
        "_xpu_XPUAllocator": object,
        "_XPUMemPool": object,
    }


def give(library: ctypes.CDLL, kind: str) -> None:
    """Put all of it into `torch._C`, before `torch.cuda` or `torch.xpu` is imported."""
    global DEVICES
    DEVICES = library
    _declare(library)
    C: Any = sys.modules["torch._C"]
    for found in [_of_xpu(C)] if kind == "xpu" else [_devices(C), _streams(C), _memory(C), _graphs(C)]:
        for name, value in found.items():
            if not name.startswith(("_has_cuda", "_cudart")) or kind == "cuda":
                setattr(C, name, value)
    C._set_cudnn_enabled(False)  # nothing asks for its library
    _storages(sys.modules["torch.storage"].UntypedStorage)


def give_collectives(library: ctypes.CDLL) -> None:
    """Put NCCL's process group where torch.distributed looks for it when it is imported."""
    module = sys.modules["torch._C._distributed_c10d"]
    ctypes.PYFUNCTYPE(None, ctypes.py_object)(("simulated_collectives", library))(module)
    group: Any = module.ProcessGroupNCCL
    group.Options = type("Options", (SimpleNamespace,), {"__module__": __name__})
    group._shutdown = group._abort = lambda self: None
