"""The simulated devices refuse what CUDA refuses, count what costs time there, and arrive late where CUDA does."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simulated_gpu.counts import counted, kernels
from simulated_gpu.torch_names import devices

CUDA = torch.device("cuda", 0)


def test_torch_knows_the_devices_by_all_their_names() -> None:
    x = torch.ones(3, device="cuda")
    assert (x.is_cuda, x.device, type(x), nn.Parameter(x).device) == (True, CUDA, Tensor, CUDA)
    assert torch.cuda.is_available() and torch.cuda.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("cuda") and torch.cuda.get_device_capability() == (9, 0)
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == torch.cuda.current_device() == torch.accelerator.current_device_index() == 1
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda x: x + torch.ones(2), "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        (lambda x: x + x.to("cuda:1"), "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!"),
        (lambda x: nn.Linear(2, 1)(x), "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        (lambda x: x.numpy(), "can't convert cuda:0 device type tensor to numpy"),
        (lambda x: torch.zeros(1, device="cuda:2"), "CUDA error: invalid device ordinal"),
    ],
)
def test_what_cuda_refuses_is_refused(work: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=words):
        work(torch.ones(2, device="cuda"))


def test_a_number_of_the_cpu_may_meet_a_tensor_of_a_device() -> None:
    assert (torch.ones(2, device="cuda") * torch.tensor(3.0)).tolist() == [3, 3]


@pytest.mark.parametrize("read", [Tensor.item, Tensor.cpu, bool, float, Tensor.tolist, lambda x: torch.nonzero(x)])
def test_a_value_that_is_read_is_one_wait(read: Callable[[Tensor], Any]) -> None:
    x = torch.ones(1, device="cuda")
    with counted() as counts:
        read(x)
    assert counts.waits == 1


def test_a_tensor_that_is_printed_makes_the_host_wait() -> None:
    x = torch.ones(3, device="cuda")
    with counted() as counts:
        assert str(x) == "tensor([1., 1., 1.], device='cuda:0')"
    assert counts.waits > 0


def test_a_kernel_is_one_launch_and_a_view_is_none() -> None:
    x, rows = torch.ones(4, 3, device="cuda"), [torch.ones(2, device="cuda") for _ in range(5)]
    with counted() as counts, kernels() as names:
        torch._foreach_add_(rows, 1.0)
        y = (x.t()[1:].unsqueeze(0) * 2).detach()
        nn.functional.dropout(y, 0.5)
    assert (counts.launches, counts.waits, counts.on_device) == (3, 0, 0)
    assert names == {"aten::_foreach_add_": 1, "aten::mul": 1, "aten::native_dropout": 1}
    with counted() as counts:
        x.clone()
    assert (counts.launches, counts.on_device) == (0, 1)


def test_a_copy_that_does_not_block_arrives_with_its_event() -> None:
    host = (torch.ones(3, device="cuda") * 2).to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert host.is_pinned() and host.isnan().all()
    event.synchronize()
    assert host.tolist() == [2, 2, 2]


def test_an_event_that_is_asked_is_not_ready_at_once_and_does_not_wait() -> None:
    host = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    with counted() as counts:
        assert [event.query(), event.query()] == [False, True]
    assert counts.waits == 0 and host.tolist() == [1, 1, 1]


def test_pinned_memory_that_is_written_too_early_is_found() -> None:
    host = torch.ones(3).pin_memory()
    host.to("cuda", non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="pinned memory was written while a non_blocking copy to the device still read it"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("order", ["", "wait_stream", "event", "synchronize"])
def test_streams_are_ordered_by_events_alone(order: str) -> None:
    side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        event = side.record_event()
    if order == "wait_stream":
        torch.cuda.current_stream().wait_stream(side)
    elif order == "event":
        torch.cuda.current_stream().wait_event(event)
    elif order == "synchronize":
        side.synchronize()
    if order:
        assert (y + 1).tolist() == [3, 3, 3]
        y.record_stream(torch.cuda.current_stream())
    else:
        with pytest.raises(RuntimeError, match=r"aten::add on stream 0 .* reads what was written by aten::add on stream \d+"):
            y + 1


def test_memory_that_is_freed_while_another_stream_uses_it_is_found() -> None:
    side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    del x
    with pytest.raises(RuntimeError, match="was freed while aten::add on stream .* may still use it"):
        torch.cuda.synchronize()


def test_memory_is_kept_for_a_stream_that_has_waited_for_the_one_that_uses_it() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        x = torch.ones(3, device="cuda")
    second.wait_stream(first)
    with torch.cuda.stream(second):
        x + 1
    torch.cuda.current_stream().wait_stream(second)
    x.record_stream(torch.cuda.current_stream())
    del x
    torch.cuda.synchronize()


def test_a_view_in_inference_mode_is_that_of_its_tensor() -> None:
    model, x = nn.Linear(3, 2).to("cuda"), torch.ones(4, 3, device="cuda")
    with torch.inference_mode():
        assert model(x).is_inference() and not model.weight.t().is_inference() and torch.ones(3, device="cuda").t().is_inference()
    model(x).sum().backward()


def test_memory_is_counted_and_runs_out() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096 == torch.accelerator.memory_allocated() - before  # in blocks of 512
    y = x + x
    del y
    assert torch.cuda.max_memory_allocated() - before == 8192 and torch.cuda.memory_allocated() - before == 4096
    free, total = torch.cuda.mem_get_info()
    assert total == 16 * 2**30 and free <= total - 8192 and torch.cuda.memory_allocated(1) == 0
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 18.63 GiB. GPU 0 has a total capacity of 16.00 GiB"
    ):
        torch.empty(5 * 10**9, device="cuda")
    devices().simulated_total(1, 2**20)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(2**20, device="cuda:1")
    devices().simulated_total(1, 16 * 2**30)


def test_each_device_draws_its_own_numbers() -> None:
    torch.manual_seed(5)
    cpu, states = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    first = torch.rand(3, device="cuda")
    assert torch.equal(torch.get_rng_state(), cpu) and torch.equal(torch.cuda.get_rng_state(1), states[1])
    assert not torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="cuda"), first) and torch.equal(torch.rand(3, device="cuda:1").cpu(), first.cpu())
    own = torch.Generator("cuda").manual_seed(5)
    before = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(3, device="cuda", generator=own), first) and torch.equal(torch.cuda.get_rng_state(), before)
    masks = [nn.functional.dropout(torch.ones(99, device="cuda"), 0.5) for _ in range(2)]
    assert not torch.equal(*masks)


def test_the_gradients_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3), nn.GELU())
    model, x = copy.deepcopy(host).to("cuda"), torch.randn(5, 1, 4, 4)
    for own, device in ((host, "cpu"), (model, "cuda")):
        nn.functional.cross_entropy(own(x.to(device)), torch.arange(5, device=device) % 3).backward()
    for a, b in zip(host.parameters(), model.parameters()):
        torch.testing.assert_close(b.grad.cpu(), a.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_cells_have_the_gradients_of_the_cpu(kind: type[Any]) -> None:
    host = kind(3, 5)
    model, x = copy.deepcopy(host).to("cuda"), torch.randn(4, 2, 3)
    host(x)[0].square().sum().backward()
    model(x.to("cuda"))[0].square().sum().backward()
    for a, b in zip(host.parameters(), model.parameters()):
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def test_sparse_gradients_train_as_on_the_cpu() -> None:
    tables = [nn.Embedding(9, 4, sparse=True)]
    tables.append(copy.deepcopy(tables[0]).to("cuda"))
    for table in tables:
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(3):
            table(torch.tensor([1, 2, 2, 5], device=table.weight.device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(tables[0].weight, tables[1].weight.cpu())


def test_mixed_precision_and_its_scaler() -> None:
    model = nn.Linear(3, 2).to("cuda")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, fused=True), torch.amp.GradScaler("cuda", init_scale=8.0)
    before = model.weight.clone()
    with torch.autocast("cuda", torch.float16):
        output = model(torch.ones(1, 3, device="cuda"))
    scaler.scale(output.sum() * float("inf")).backward()
    with counted() as counts:
        scaler.step(optimizer)
        scaler.update()
    assert (output.dtype, counts.waits, scaler.get_scale()) == (torch.float16, 0, 4.0) and torch.equal(model.weight, before)


def test_a_graph_computes_when_it_is_replayed() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(2, device="cuda")
    with torch.cuda.graph(graph):
        y = (x * 3).sum()
        x.add_(1)
    assert x.tolist() == [1, 1]
    with counted() as counts:
        graph.replay()
        graph.replay()
    assert (counts.launches, y.item(), x.tolist()) == (2, 12, [3, 3])


def test_a_graph_draws_the_numbers_that_come_when_it_is_replayed() -> None:
    torch.cuda.manual_seed(1)
    expected = [torch.rand(2, device="cuda") for _ in range(2)]
    torch.cuda.manual_seed(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.rand(2, device="cuda")
    for numbers in expected:
        graph.replay()
        assert torch.equal(x, numbers)


def test_a_graph_can_not_wait() -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


def test_what_is_saved_returns_to_its_device() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.ones(2, device="cuda:1"), "b": torch.zeros(1)}, file)
    for device, found in ((None, "cuda:1"), ("cpu", "cpu"), ("cuda:0", "cuda:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=device)
        assert (str(loaded["a"].device), loaded["a"].tolist()) == (found, [1, 1])


def test_a_fork_can_not_use_a_device() -> None:
    x = torch.ones(2, device="cuda")
    child = os.fork()
    if child == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(7 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
