// What torch.distributed knows as NCCL, between processes that have simulated devices. gloo computes in their memory, beside the host, which
// doesn't wait. A collective is one kernel on a stream of the process group: it comes after what the current stream has launched, and other
// streams may use its tensors once they have waited for it.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <pybind11/pybind11.h>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace simulated {
using Tensors = std::vector<Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

struct Collective final : c10d::Work {
  Collective(c10d::OpType type, Key stream, ::simulated::Work host, const Tensors& results, bool holds_host)
      : Work(-1, type), stream(stream), finished_by(clock_of(stream)), host(std::move(host)), results(results), holds_host(holds_host),
        future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<Device>{Device(CUDA, stream.first)})) {
    c10::StreamGuard guard(as_stream(stream));
    future->markCompleted(results);
  }
  Key stream;
  Clock finished_by;
  ::simulated::Work host;  // gloo's
  Tensors results;
  bool holds_host;  // a barrier's wait does
  c10::intrusive_ptr<c10::ivalue::Future> future;

  bool isCompleted() override { return host->isCompleted(); }
  bool isSuccess() const override { return host->isSuccess(); }
  bool wait(std::chrono::milliseconds) override {
    if (holds_host) host->wait();
    Held held;
    merge(seen[stream_of(stream.first)], finished_by);
    if (holds_host) devices[stream.first].counts.waits++, simulated::finish(finished_by);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

struct Group final : c10d::Backend {
  using Type = c10d::OpType;
  Group(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : Backend(rank, size), gloo(std::move(gloo)) {
    static StreamId next = 100;  // above those of torch.cuda.Stream
    Held held;
    id = next++;
  }
  c10::intrusive_ptr<c10d::Backend> gloo;
  StreamId id;

  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  template <class F>  // start(reads, writes): gloo's work on what stands for the tensors
  Work launch(const char* name, Type type, const Tensors& reads, const Tensors& writes, F start, bool holds_host = false) {
    Held held;
    check_process();
    check_faults();
    Call call;
    Tensors from, to;
    for (auto& tensor : reads) from.push_back(call.stand_in(tensor, false, name));
    for (auto& tensor : writes) to.push_back(call.stand_in(tensor, true, name));
    for (auto& tensor : from) TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    for (auto& tensor : to) TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    Key stream{call.device, id}, asking = stream_of(call.device);
    TORCH_CHECK(!captures(asking), "a CUDA graph with collectives is not simulated");
    simulated::merge(seen[stream], clock_of(asking));
    use_memory(stream, call.reads, call.writes, name);
    count_launch(call.device, name);
    Work host = start(from, to);
    for (auto list : {&call.reads, &call.writes})
      for (Block* block : *list) block->pending = host, block->recorded.insert(stream);
    return c10::make_intrusive<Collective>(type, stream, host, writes, holds_host);
  }
  c10d::ReduceOp summed(c10d::ReduceOp op, Tensors& inputs) const {  // gloo has no mean; NCCL's is a sum of parts
    if (op != c10d::ReduceOp::AVG) return op;
    for (auto& tensor : inputs) tensor.mul_(1.0 / getSize());
    return c10d::ReduceOp::SUM;
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    return launch("nccl::all_reduce", Type::ALLREDUCE, {}, tensors, [&](Tensors&, Tensors& own) {
      auto options = given;
      options.reduceOp = summed(given.reduceOp, own);
      return gloo->allreduce(own, options);
    });
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    return launch("nccl::reduce", Type::REDUCE, {}, tensors, [&](Tensors&, Tensors& own) {
      auto options = given;
      options.reduceOp = summed(given.reduceOp, own);
      return gloo->reduce(own, options);
    });
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch("nccl::broadcast", Type::BROADCAST, {}, tensors, [&](Tensors&, Tensors& own) { return gloo->broadcast(own, options); });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch("nccl::all_gather", Type::ALLGATHER, inputs, outputs.at(0), [&](Tensors& from, Tensors& to) {
      std::vector<Tensors> lists{to};
      return gloo->allgather(lists, from, options);
    });
  }
  Work _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch("nccl::all_gather", Type::_ALLGATHER_BASE, {input}, {output}, [&](Tensors& from, Tensors& to) {
      Tensor own = from[0].clone();  // it may be a part of the output
      return gloo->_allgather_base(to[0], own, options);
    });
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch("nccl::all_gather", Type::COALESCED, inputs, outputs, [&](Tensors& from, Tensors& to) {
      return gloo->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  Work _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& given) override {
    return launch("nccl::reduce_scatter", Type::_REDUCE_SCATTER_BASE, {input}, {output}, [&](Tensors& from, Tensors& to) {
      auto options = given;
      Tensors own{from[0].clone()};
      options.reduceOp = summed(given.reduceOp, own);
      return gloo->_reduce_scatter_base(to[0], own[0], options);
    });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return launch("nccl::scatter", Type::SCATTER, inputs.empty() ? Tensors() : inputs[0], outputs, [&](Tensors& from, Tensors& to) {
      std::vector<Tensors> lists;
      if (!inputs.empty()) lists.push_back(from);
      return gloo->scatter(to, lists, options);
    });
  }
  Work barrier(const c10d::BarrierOptions& given) override {
    DeviceIndex i = given.device_ids.empty() ? current : given.device_ids[0];
    Tensors one{at::zeros({1}, at::device(Device(CUDA, i)))};
    return launch("nccl::barrier", Type::BARRIER, {}, one, [&](Tensors&, Tensors& own) { return gloo->allreduce(own); }, true);
  }
};
struct Timer final : c10d::Timer {  // of DistributedDataParallel's statistics
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
}  // namespace simulated
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated::Timer)
}  // namespace c10d

// `module`: torch._C._distributed_c10d, which gets a ProcessGroupNCCL
extern "C" void simulated_collectives(PyObject* given) {
  namespace py = pybind11;
  using simulated::Group;
  auto module = py::reinterpret_borrow<py::module_>(given);
  py::object gloo = module.attr("ProcessGroupGloo");
  auto make = [gloo](const py::object& store, int rank, int size, const py::object& options) {
    py::object made = gloo(store, rank, size, py::arg("timeout") = options.attr("_timeout"));
    return c10::make_intrusive<Group>(rank, size, c10::intrusive_ptr<c10d::Backend>::unsafe_reclaim_from_nonowning(made.cast<c10d::Backend*>()));
  };
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(module, "ProcessGroupNCCL").def(py::init(make));
}
