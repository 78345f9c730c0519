// CUDA devices that are not there: torch's own CPU build, with what a CUDA build registers. Tensors say cuda:0 and lie in memory of their own;
// kernels compute on the CPU, in the order in which they are launched. What a real device would do later and out of order is checked by clocks:
// each stream counts its launches and knows what it has waited for, so that a read which nothing orders is an error, on every machine alike.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#ifdef SIMULATED_XPU  // the same devices by another name
#define KIND XPU
#define SPARSE_KIND SparseXPU
#else
#define KIND CUDA
#define SPARSE_KIND SparseCUDA
#endif

namespace simulated {
using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream, c10::StreamId;
constexpr int MOST = 8;
constexpr DeviceType KIND = DeviceType::KIND;
using Key = std::pair<DeviceIndex, StreamId>;  // a stream
using Clock = std::map<Key, uint64_t>;         // how much of each stream is known to be finished

// -- state, under one lock; never destroyed, because tensors are freed until the process ends
auto& lock = *new std::recursive_mutex;
thread_local int depth = 0;
thread_local std::vector<c10::IValue> dropped;  // tensors to let go of: the last reference to one may need Python's lock, which another thread may
                                                // hold while it waits for this one
struct Held {
  Held() { lock.lock(), depth++; }
  ~Held() {
    std::vector<c10::IValue> freed;
    if (--depth == 0) freed.swap(dropped);
    lock.unlock();
  }
};
int n_devices = 2;
pid_t owner = 0;  // the process that has initialized the devices; a fork of it can't use them
thread_local DeviceIndex current = 0;
thread_local std::array<StreamId, MOST> current_streams{};

struct Use {
  uint64_t at = 0;
  const char* name = "";
};
struct Block {  // memory of a device, or pinned memory of the host
  void* ptr = nullptr;
  size_t asked = 0, size = 0;
  DeviceIndex device = -1;
  StreamId stream = 0;               // the stream on which it was allocated
  std::map<Key, Use> reads, writes;  // the last of each stream
  std::set<Key> recorded;            // Tensor.record_stream
  bool of_graph = false;             // in the pool of a CUDA graph, which nothing else gets
  c10::intrusive_ptr<c10d::Work> pending;  // of other processes too, which computes with it beside the host
  void settle() {
    if (auto work = std::move(pending)) work->wait();
  }
};
struct Graph {  // what was launched while it was captured, and does again
  Key stream;
  std::vector<std::function<void()>> kernels;
  std::vector<Block*> reads, writes;
};
struct Counts {
  int64_t launches = 0, waits = 0, to_device = 0, to_host = 0, on_device = 0;
};
struct Dev {
  int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, allocations = 0, ooms = 0, total = int64_t(16) << 30;
  StreamId next_stream = 0;
  bool touched = false;
  Counts counts;
};
struct Copy {  // one that the host doesn't know to be finished
  Key stream;
  uint64_t at;
  Tensor host, bytes;
  bool to_host;
};
auto& devices = *new std::array<Dev, MOST>;
auto& launched = *new std::map<Key, uint64_t>;  // by each stream
auto& seen = *new std::map<Key, Clock>;         // what each stream has waited for
auto& finished = *new Clock;                    // what the host has waited for
auto& copies = *new std::vector<Copy>;
auto& pinned = *new std::map<const void*, size_t>;
auto& faults = *new std::vector<std::string>;   // found where nothing may be raised
auto& graphs = *new std::vector<std::unique_ptr<Graph>>;
Graph* capturing = nullptr;
bool traced = false;
auto& names = *new std::string;  // of the kernels that were launched, where they are traced

bool mine(DeviceIndex i) { return i >= 0 && i < n_devices; }
bool ours(const Tensor& tensor) { return tensor.device().type() == KIND; }
DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }
Key stream_of(DeviceIndex i) { return {i, current_streams[i]}; }
Stream as_stream(Key key) { return Stream(Stream::UNSAFE, Device(KIND, key.first), key.second); }
std::string word(Key key) { return "stream " + std::to_string(key.second) + " of cuda:" + std::to_string(key.first); }

void check_process() {
  if (owner == 0) owner = getpid();
  TORCH_CHECK(
      owner == getpid(),
      "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method");
}
void check_faults() {
  if (faults.empty()) return;
  std::string found = faults.front();
  faults.clear();
  TORCH_CHECK(false, found);
}

// -- order: what a stream and the host may read
void merge(Clock& into, const Clock& from) {
  for (auto& [key, at] : from) into[key] = std::max(into[key], at);
}
Clock clock_of(Key key) {  // what is finished once this stream's launches are
  Clock result = seen[key];
  result[key] = launched[key];
  return result;
}
bool ordered(Key key, const Clock& waited, Key other, uint64_t at) {
  if (key == other) return true;
  auto a = waited.find(other);
  if (a != waited.end() && a->second >= at) return true;
  auto b = finished.find(other);
  return b != finished.end() && b->second >= at;
}
void check_order(Key key, const std::map<Key, Use>& uses, const char* name, const char* doing) {
  for (auto& [other, use] : uses)
    TORCH_CHECK(
        ordered(key, seen[key], other, use.at), name, " on ", word(key), doing, use.name, " on ", word(other),
        ", and does not wait for it: wait_stream() or wait_event() orders them");
}
uint64_t use_memory(Key key, const std::vector<Block*>& reads, const std::vector<Block*>& writes, const char* name) {
  for (Block* block : reads) check_order(key, block->writes, name, " reads what was written by ");
  for (Block* block : writes) {
    check_order(key, block->writes, name, " writes what was written by ");
    check_order(key, block->reads, name, " writes what was read by ");
  }
  for (auto list : {&reads, &writes})
    for (Block* block : *list) block->settle();
  uint64_t at = ++launched[key];
  for (Block* block : reads) block->reads[key] = {at, name};
  for (Block* block : writes) block->writes[key] = {at, name}, block->reads.clear();
  return at;
}
void finish(const Clock& clock) {  // the host has waited for it
  merge(finished, clock);
  std::vector<Copy> done, left;
  for (auto& copy : copies) (finished[copy.stream] >= copy.at ? done : left).push_back(copy);
  copies = left;
  for (auto& copy : done) dropped.emplace_back(copy.host), dropped.emplace_back(copy.bytes);
  bool overwritten = false;
  for (auto& copy : done) {
    if (copy.to_host)
      std::memcpy(copy.host.data_ptr(), copy.bytes.data_ptr(), copy.bytes.nbytes());
    else
      overwritten |= std::memcmp(copy.host.data_ptr(), copy.bytes.data_ptr(), copy.bytes.nbytes()) != 0;
  }
  TORCH_CHECK(!overwritten, "pinned memory was written while a non_blocking copy to the device still read it: wait for the copy's event first");
}
bool captures(Key key) { return capturing != nullptr && capturing->stream == key; }
void wait_for(Key key) {
  TORCH_CHECK(!captures(key), "CUDA error: operation not permitted when stream is capturing");
  devices[key.first].counts.waits++;
  finish(clock_of(key));
  check_faults();
}
void wait_for_device(DeviceIndex i) {
  devices[i].counts.waits++;
  Clock all;
  for (auto& [key, at] : launched)
    if (key.first == i) merge(all, clock_of(key));
  finish(all);
  check_faults();
}

// -- memory
std::string size_text(double bytes) {
  std::ostringstream out;
  out.precision(2);
  const char* units[] = {"bytes", "KiB", "MiB", "GiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 3) bytes /= 1024, unit++;
  out << std::fixed << bytes << ' ' << units[unit];
  return out.str();
}
void free_block(void* context) {
  Held held;
  auto block = static_cast<Block*>(context);
  try {
    block->settle();
  } catch (const std::exception&) {  // the other process is gone: who waits for the work hears of it
  }
  if (block->device >= 0) {
    devices[block->device].allocated -= block->size;
    Key home{block->device, block->stream};
    if (block->of_graph) block->reads.clear(), block->writes.clear();
    std::vector<Key> waited{block->recorded.begin(), block->recorded.end()};  // the memory is used again when these have done what they are to do now
    waited.push_back(home);
    for (auto uses : {&block->reads, &block->writes})
      for (auto& [key, use] : *uses)
        if (std::none_of(waited.begin(), waited.end(), [&](Key other) { return ordered(other, seen[other], key, use.at); }) && faults.empty())
          faults.push_back(
              std::string("memory of ") + word(home) + " was freed while " + use.name + " on " + word(key) +
              " may still use it: tensor.record_stream() keeps it");
  }
  pinned.erase(block->ptr);
  std::free(block->ptr);
  delete block;
}
Block* block_of(const c10::StorageImpl& storage) {
  auto& data = storage.data_ptr();
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}
Block* block_of(const Tensor& tensor) { return tensor.has_storage() ? block_of(*tensor.storage().unsafeGetStorageImpl()) : nullptr; }
bool is_pinned(const Tensor& tensor) {
  Block* block = block_of(tensor);
  return block != nullptr && block->device < 0;
}
c10::DataPtr new_block(DeviceIndex i, size_t n) {
  auto block = new Block{nullptr, n, (n + 511) / 512 * 512, i, i < 0 ? 0 : current_streams[i]};
  if (i >= 0) {
    Dev& device = devices[i];
    device.touched = true;
    int64_t after = device.allocated + block->size;
    if (after > device.total) {
      device.ooms++;
      std::string wanted = size_text(block->size), all = size_text(device.total), used = size_text(device.allocated);
      delete block;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", wanted, ". GPU ", int(i), " has a total capacity of ", all, " of which ",
          size_text(device.total - device.allocated), " is free. Of the allocated memory ", used, " is allocated by PyTorch.");
    }
    device.allocated = after, device.allocations++;
    device.peak = std::max(device.peak, after), device.reserved = std::max(device.reserved, after);
    device.reserved_peak = std::max(device.reserved_peak, device.reserved);
    block->of_graph = captures(stream_of(i));
  }
  if (n > 0) {
    block->ptr = std::aligned_alloc(64, block->size);
    std::memset(block->ptr, 0xFF, block->size);  // NaN: what nothing has written shows
    if (i < 0) pinned[block->ptr] = n;
  }
  return {block->ptr, block, &free_block, i < 0 ? Device(DeviceType::CPU) : Device(KIND, i)};
}
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    Held held;
    check_process();
    return new_block(current, n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool initialized() override { return owner != 0; }
  void emptyCache(c10::MempoolId_t) override {
    Held held;
    for (auto& device : devices) device.reserved = device.allocated;
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    Held held;
    if (data.get_deleter() == &free_block) static_cast<Block*>(data.get_context())->recorded.insert({stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override {
    Held held;
    Dev& device = devices.at(i);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto put = [](auto& stat, int64_t now, int64_t peak) { stat[0].current = now, stat[0].peak = peak; };
    put(stats.allocated_bytes, device.allocated, device.peak);
    put(stats.active_bytes, device.allocated, device.peak);
    put(stats.requested_bytes, device.allocated, device.peak);
    put(stats.reserved_bytes, device.reserved, device.reserved_peak);
    stats.num_ooms = device.ooms, stats.num_device_alloc = device.allocations;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex i) override {
    Held held;
    devices.at(i).peak = devices.at(i).allocated, devices.at(i).reserved_peak = devices.at(i).reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override { return {devices.at(i).total - devices.at(i).reserved, devices.at(i).total}; }
};
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    Held held;
    return new_block(-1, n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }  // a copy that isn't finished holds its tensor
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
auto& device_memory = *new DeviceMemory;
auto& pinned_memory = *new PinnedMemory;

// -- random numbers: a seed and a place, as on CUDA
struct Random final : c10::GeneratorImpl {
  explicit Random(DeviceIndex i) : GeneratorImpl(Device(KIND, i), c10::DispatchKeySet(c10::DispatchKey::KIND)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device_type() == DeviceType::CPU, "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8), std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.data_ptr(), &seed_, 8), std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Random* clone_impl() const override {
    auto copy = new Random(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  at::Generator draw() {  // the numbers of the next kernel
    std::lock_guard<std::mutex> held(mutex_);
    uint64_t mixed = (seed_ + 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull + offset_ * 0x94D049BB133111EBull;
    offset_ += 4;
    return at::detail::createCPUGenerator((mixed ^ (mixed >> 31)) & 0xFFFFFFFF);
  }
};
bool adopting = false;  // a generator that Python makes is the device's default one
auto& generators = *new std::array<at::Generator, MOST>;
at::Generator& generator_of(DeviceIndex i) {
  Held held;
  if (!generators.at(i).defined()) generators[i] = at::make_generator<Random>(i);
  return generators[i];
}
Random& random_of(const at::Generator& generator) { return *static_cast<Random*>(generator.unsafeGetGeneratorImpl()); }

// -- kernels
struct Call {  // the tensors of one call, and what stands for them on the CPU
  std::vector<std::pair<Tensor, Tensor>> pairs, sparse_pairs;
  std::vector<Block*> reads, writes;
  std::map<c10::StorageImpl*, c10::Storage> storages;
  DeviceIndex device = -1;
  bool plain = false;  // a tensor of the CPU with dimensions is among them
  std::vector<std::pair<at::Generator, uint64_t>> offsets;  // of the generators that were drawn from, before

  at::Generator drawn(const at::Generator& generator) {
    offsets.emplace_back(generator, random_of(generator).offset_);
    return random_of(generator).draw();
  }
  void meet(DeviceIndex i, const char* name) {
    TORCH_CHECK(
        device < 0 || device == i, "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(std::min(device, i)),
        " and cuda:", int(std::max(device, i)), "! (", name, ")");
    device = i;
  }
  Tensor stand_in(const Tensor& tensor, bool written, const char* name) {
    if (!tensor.defined()) return tensor;
    if (!ours(tensor)) {
      plain |= tensor.dim() > 0;
      return tensor;
    }
    meet(tensor.device().index(), name);
    if (tensor.is_sparse()) return sparse_stand_in(tensor, written, name);
    if (Block* block = block_of(tensor)) (written ? writes : reads).push_back(block);
    for (auto& [known, cpu] : pairs)
      if (known.is_same(tensor)) return cpu;
    auto& storage = storages[tensor.storage().unsafeGetStorageImpl()];
    if (!storage)
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(tensor.storage().mutable_data(), DeviceType::CPU),
          c10::GetAllocator(DeviceType::CPU), true);
    Tensor cpu = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    cpu.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    pairs.emplace_back(tensor, cpu);
    return cpu;
  }
  static at::SparseTensorImpl* sparse(const Tensor& tensor) { return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl()); }
  static void set_sparse(const Tensor& tensor, at::SparseTensorImpl* like, const Tensor& indices, const Tensor& values) {
    sparse(tensor)->raw_resize_(like->sparse_dim(), like->dense_dim(), like->sizes());
    sparse(tensor)->set_indices_and_values_unsafe(indices, values);
    sparse(tensor)->set_coalesced(like->coalesced());
  }
  Tensor sparse_stand_in(const Tensor& tensor, bool written, const char* name) {
    for (auto& [known, cpu] : sparse_pairs)
      if (known.is_same(tensor)) return cpu;
    auto own = sparse(tensor);
    Tensor cpu = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), tensor.dtype());
    set_sparse(cpu, own, stand_in(own->indices(), written, name), stand_in(own->values(), written, name));
    sparse_pairs.emplace_back(tensor, cpu);
    return cpu;
  }
  Tensor sparse_result(const Tensor& cpu) {
    for (auto& [tensor, known] : sparse_pairs)
      if (known.is_same(cpu)) return tensor;
    Tensor tensor = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SPARSE_KIND), cpu.dtype());
    set_sparse(tensor, sparse(cpu), result(sparse(cpu)->indices()), result(sparse(cpu)->values()));
    return tensor;
  }
  c10::IValue argument(const c10::IValue& value, bool written, const char* name) {
    if (value.isTensor()) return stand_in(value.toTensor(), written, name);
    if (value.isTensorList()) {
      c10::List<Tensor> result;
      for (const Tensor& tensor : value.toTensorVector()) result.push_back(stand_in(tensor, written, name));
      return result;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> result;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        result.push_back(tensor ? std::optional<Tensor>(stand_in(*tensor, written, name)) : std::nullopt);
      return result;
    }
    if (value.isDevice() && value.toDevice().type() == KIND) {
      meet(index_of(value.toDevice()), name);
      return Device(DeviceType::CPU);
    }
    if (value.isGenerator() && value.toGenerator().device().type() == KIND) {
      return drawn(value.toGenerator());
    }
    return value;
  }
  Tensor result(const Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    if (cpu.is_sparse()) return sparse_result(cpu);
    for (auto& [tensor, known] : pairs)
      if (known.is_same(cpu)) return tensor;
    Tensor tensor;
    for (auto& [viewed, known] : pairs)  // a view has the keys of what it views: in inference mode, that of a parameter is no inference tensor
      if (!tensor.defined() && known.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl())
        tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(viewed.storage()), viewed.key_set(), cpu.dtype());
    if (!tensor.defined()) {
      c10::DataPtr data = new_block(device, cpu.storage().nbytes());
      if (cpu.storage().nbytes() > 0) std::memcpy(data.get(), cpu.storage().data(), cpu.storage().nbytes());
      writes.push_back(static_cast<Block*>(data.get_context()));
      c10::Storage storage(c10::Storage::use_byte_size_t(), cpu.storage().nbytes(), std::move(data), &device_memory, true);
      tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::KIND), cpu.dtype());
    }
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    if (cpu.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }
  c10::IValue output(const c10::IValue& value) {
    if (value.isTensor()) return result(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& tensor : value.toTensorVector()) found.push_back(result(tensor));
      return found;
    }
    return value;
  }
  void keep_resized() {  // `out=` and resize_ may have given a tensor other memory
    for (auto& [tensor, cpu] : pairs) {
      auto own = tensor.storage().unsafeGetStorageImpl();
      size_t n = cpu.storage().nbytes();
      if (cpu.storage().data() != own->data()) {
        c10::DataPtr data = new_block(device, n);
        if (n > 0) std::memcpy(data.get(), cpu.storage().data(), n);
        writes.push_back(static_cast<Block*>(data.get_context()));
        for (auto list : {&reads, &writes}) std::erase(*list, block_of(*own));
        own->set_data_ptr_noswap(std::move(data));
        own->set_nbytes(n);
      }
      if (cpu.sizes() != tensor.sizes() || cpu.strides() != tensor.strides() || cpu.storage_offset() != tensor.storage_offset())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
    for (auto& [tensor, cpu] : sparse_pairs) set_sparse(tensor, sparse(cpu), result(sparse(cpu)->indices()), result(sparse(cpu)->values()));
  }
};

const std::set<std::string> READ_BY_HOST{  // their result's size or value is decided by the host, which waits for it
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",          "aten::is_nonzero", "aten::_unique", "aten::_unique2",
    "aten::unique_dim",          "aten::bincount", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::_linalg_check_errors", "aten::_coalesce"};
const std::set<std::string> BOTH_DEVICES{  // an index may lie on the CPU, and is copied
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
const std::set<std::string> NO_KERNEL{"aten::_local_scalar_dense", "aten::resize_", "aten::set_", "aten::empty", "aten::empty_strided"};

bool is_mask(const c10::IValue& value) {
  if (!value.isOptionalTensorList()) return false;
  for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
    if (tensor && tensor->defined() && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte)) return true;
  return false;
}
const char* kept(const std::string& name) {  // names of operators live as long as the process
  static std::set<std::string> all;
  return all.insert(name).first->c_str();
}
void count_launch(DeviceIndex i, const char* name) {
  if (captures(stream_of(i))) return;
  devices[i].counts.launches++;
  if (traced) names += std::string(name) + "\n";
}
using Stack = torch::jit::Stack;
void compute(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(&stack);
}
Stack stand_ins(const c10::OperatorHandle& op, const Stack& given, Call& call, const char* name) {
  auto& arguments = op.schema().arguments();
  Stack inner;
  for (size_t i = 0; i < given.size(); i++)
    inner.push_back(call.argument(given[i], arguments[i].alias_info() && arguments[i].alias_info()->isWrite(), name));
  if (call.device < 0) call.device = current;
  for (size_t i = 0; i < given.size(); i++)
    if (given[i].isNone() && arguments[i].name() == "generator") inner[i] = call.drawn(generator_of(call.device));
  return inner;
}
void each_tensor(const Stack& values, const std::function<void(const Tensor&)>& act) {
  for (auto& value : values) {
    if (value.isTensor() && value.toTensor().defined()) act(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) act(tensor);
  }
}
struct Undone {  // what a capture doesn't compute
  std::vector<std::pair<Block*, std::string>> bytes;
  explicit Undone(const std::vector<Block*>& writes) {
    for (Block* block : writes) bytes.emplace_back(block, std::string(static_cast<char*>(block->ptr), block->asked));
  }
  ~Undone() {
    for (auto& [block, before] : bytes) std::memcpy(block->ptr, before.data(), before.size());
  }
};
Tensor bare(const Tensor& tensor) {  // its memory, without the autograd graph, which would stay alive with a CUDA graph
  return tensor.defined() ? Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false)) : tensor;
}
Stack bare(const Stack& values) {
  Stack found;
  for (auto& value : values) {
    if (value.isTensor()) {
      found.push_back(bare(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(bare(tensor));
      found.push_back(list);
    } else {
      found.push_back(value);
    }
  }
  return found;
}
void keep(Call& call, std::function<void()> again) {  // in the graph that is captured
  Graph& graph = *capturing;
  graph.kernels.push_back(std::move(again));
  graph.reads.insert(graph.reads.end(), call.reads.begin(), call.reads.end());
  graph.writes.insert(graph.writes.end(), call.writes.begin(), call.writes.end());
}
void compute_again(const c10::OperatorHandle& op, const Stack& given, const Stack& results, const char* name) {
  Call call;
  Stack inner = stand_ins(op, given, call, name);
  compute(op, inner);
  std::vector<Tensor> from, to;
  each_tensor(inner, [&](const Tensor& tensor) { from.push_back(tensor); });
  each_tensor(results, [&](const Tensor& tensor) { to.push_back(tensor); });
  for (size_t i = 0; i < from.size(); i++)
    if (from[i].storage().data() != to[i].storage().data())
      std::memcpy(to[i].storage().mutable_data(), from[i].storage().data(), from[i].storage().nbytes());
}
void kernel(const c10::OperatorHandle& op, Stack* stack) {
  Held held;
  check_process();
  check_faults();
  const auto& schema = op.schema();
  const std::string& operator_name = schema.name();
  const char* name = kept(operator_name);
  Stack given(stack->end() - schema.arguments().size(), stack->end());
  dropped.insert(dropped.end(), given.begin(), given.end());
  torch::jit::drop(*stack, given.size());
  if (operator_name == "aten::_amp_foreach_non_finite_check_and_unscale_")
    for (const Tensor& tensor : given[0].toTensorVector())
      TORCH_CHECK_NOT_IMPLEMENTED(
          tensor.scalar_type() != at::kBFloat16, "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
  bool waits = READ_BY_HOST.count(operator_name) > 0;
  for (auto& value : given) waits |= is_mask(value);
  Call call;
  Stack inner = stand_ins(op, given, call, name);
  TORCH_CHECK(
      !call.plain || BOTH_DEVICES.count(operator_name), "Expected all tensors to be on the same device, but found at least two devices, cuda:",
      int(call.device), " and cpu! (when checking arguments in method wrapper_CUDA_", operator_name.substr(operator_name.find(':') + 2), ")");
  Key stream = stream_of(call.device);
  bool view = !schema.returns().empty();
  for (auto& value : schema.returns()) view &= value.alias_info() && !value.alias_info()->isWrite();
  bool launches = !view && !NO_KERNEL.count(operator_name), captured = launches && captures(stream);
  if (waits) TORCH_CHECK(!captured, "CUDA error: operation not permitted when stream is capturing");
  std::unique_ptr<Undone> undone = captured ? std::make_unique<Undone>(call.writes) : nullptr;
  if (launches && !captured) use_memory(stream, call.reads, call.writes, name);  // before it computes: a race is not computed
  if (waits)
    for (Block* block : call.reads) block->settle();
  compute(op, inner);
  call.keep_resized();
  size_t n_written = call.writes.size();
  Stack results;
  for (auto& value : inner) results.push_back(call.output(value));
  stack->insert(stack->end(), results.begin(), results.end());
  if (launches) count_launch(call.device, name);
  if (captured)
    for (auto& [generator, offset] : call.offsets) random_of(generator).offset_ = offset;
  if (captured)
    keep(call, [op, given = bare(given), results = bare(results), name] { compute_again(op, given, results, name); });
  else if (launches)
    for (size_t i = n_written; i < call.writes.size(); i++) call.writes[i]->writes[stream] = {launched[stream], name};
  if (operator_name == "aten::_local_scalar_dense") devices[call.device].counts.to_host++;
  if (waits) wait_for(stream);
}
void boxed(const c10::OperatorHandle& op, Stack* stack) { kernel(op, stack); }

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Device(KIND, index_of(device.value_or(Device(KIND)))));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::KIND), dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}
Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(Device(KIND, index_of(device.value_or(Device(KIND)))));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::KIND), dtype.value_or(at::get_default_dtype_as_scalartype()));
}
template <class F>
auto as_one(const Tensor& like, const char* name, F work) {  // what is one kernel there, and several here
  Held held;
  auto& launches = devices[like.device().index()].counts.launches;
  int64_t before = launches;
  std::string names_before = names;
  auto result = work();
  launches = before, names = names_before;
  count_launch(like.device().index(), name);
  return result;
}
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  return as_one(input, "aten::native_dropout", [&] {
    Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
    return std::make_tuple(at::mul(at::mul(input, mask), p == 1 ? 0.0 : 1 / (1 - p)), mask);
  });
}
Tensor plus(const Tensor& tensor, const std::optional<Tensor>& bias) { return bias && bias->defined() ? tensor + *bias : tensor; }
using Optional = std::optional<Tensor>;
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx, const Optional& b, const Optional& c) {
  return as_one(input, "aten::_thnn_fused_lstm_cell", [&] {
    auto gates = (plus(input, b) + plus(hidden, c)).chunk(4, 1);
    Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid(), cy = f * cx + i * g;
    return std::make_tuple(o * cy.tanh(), cy, at::cat({i, f, g, o}, 1));
  });
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Optional& of_hy, const Optional& of_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  return as_one(cx, "aten::_thnn_fused_lstm_cell_backward_impl", [&] {
    auto parts = workspace.chunk(4, 1);
    Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3], tanh = cy.tanh();
    Tensor hy = of_hy && of_hy->defined() ? *of_hy : at::zeros_like(cx), c = hy * o * (1 - tanh * tanh);
    if (of_cy && of_cy->defined()) c = c + *of_cy;
    Tensor gates = at::cat({c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), hy * tanh * o * (1 - o)}, 1);
    return std::make_tuple(gates, c * f, has_bias ? gates.sum(0, false) : Tensor());
  });
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx, const Optional& b, const Optional& c) {
  return as_one(input, "aten::_thnn_fused_gru_cell", [&] {
    auto x = plus(input, b).chunk(3, 1), h = plus(hidden, c).chunk(3, 1);
    Tensor r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
    return std::make_tuple(n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1));
  });
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& of_hy, const Tensor& workspace, bool has_bias) {
  return as_one(of_hy, "aten::_thnn_fused_gru_cell_backward", [&] {
    auto parts = workspace.chunk(5, 1);
    Tensor r = parts[0], z = parts[1], n = parts[2], hx = parts[3], hn = parts[4];
    Tensor of_n = of_hy * (1 - z) * (1 - n * n), of_z = of_hy * (hx - n) * z * (1 - z), of_r = of_n * hn * r * (1 - r);
    Tensor x = at::cat({of_r, of_z, of_n}, 1), h = at::cat({of_r, of_z, of_n * r}, 1);
    return std::make_tuple(x, h, of_hy * z, has_bias ? x.sum(0, false) : Tensor(), has_bias ? h.sum(0, false) : Tensor());
  });
}
void record_stream(Tensor& tensor, Stream stream) { device_memory.recordStream(tensor.storage().data_ptr(), stream); }

Tensor& set_storage(Tensor& tensor, at::Storage storage) { return at::native::set_(tensor, std::move(storage)); }

bool dense(const Tensor& a, const Tensor& b) { return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && a.is_non_overlapping_and_dense(); }
void copy_again(const Tensor& to, const Tensor& from) {
  Call source, target;
  at::AutoDispatchBelowADInplaceOrView below;
  target.stand_in(to, true, "aten::copy_").copy_(source.stand_in(from, false, "aten::copy_"));
}
Tensor& copy_within(Tensor& to, const Tensor& from) {
  DeviceIndex a = from.device().index(), b = to.device().index();
  Call call, target;
  call.stand_in(from, false, "aten::copy_"), target.stand_in(to, true, "aten::copy_");
  call.writes = target.writes;
  if (captures(stream_of(a))) {
    keep(call, [to = bare(to), from = bare(from)] { copy_again(to, from); });
    return to;
  }
  if (a != b) merge(seen[stream_of(a)], clock_of(stream_of(b)));  // as CUDA's copies between devices do: both streams wait for each other
  use_memory(stream_of(a), call.reads, call.writes, "aten::copy_");
  if (a != b) merge(seen[stream_of(b)], clock_of(stream_of(a)));
  if (a != b || dense(to, from))
    devices[a].counts.on_device++;
  else
    count_launch(a, "aten::copy_");
  copy_again(to, from);
  return to;
}
Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  Held held;
  check_process();
  check_faults();
  if (to.is_same(from) || to.numel() == 0) return to;
  if (ours(to) && ours(from)) return copy_within(to, from);
  const Tensor& own = ours(to) ? to : from;
  Key stream = stream_of(own.device().index());
  auto& counts = devices[stream.first].counts;
  TORCH_CHECK(!captures(stream), "CUDA error: operation not permitted when stream is capturing");
  Call call;
  at::AutoDispatchBelowADInplaceOrView below;
  if (ours(to)) {
    Tensor y = call.stand_in(to, true, "aten::copy_");
    uint64_t at = use_memory(stream, {}, call.writes, "aten::copy_ from the host");
    y.copy_(from);
    counts.to_device++;
    if (!non_blocking)
      wait_for(stream);
    else if (is_pinned(from) && from.is_contiguous())
      copies.push_back({stream, at, from.detach(), from.detach().clone(), false});
    return to;
  }
  Tensor x = call.stand_in(from, false, "aten::copy_");
  uint64_t at = use_memory(stream, call.reads, {}, "aten::copy_ to the host");
  counts.to_host++;
  if (non_blocking && is_pinned(to) && to.is_contiguous()) {
    Tensor bytes = at::detail::empty_cpu(to.sizes(), to.scalar_type());
    bytes.copy_(x.expand(to.sizes()));
    std::memset(to.data_ptr(), 0xFF, to.nbytes());  // what is read before the copy's event is NaN, or -1
    copies.push_back({stream, at, to.detach(), bytes, true});
    return to;
  }
  to.copy_(x.expand(to.sizes()));
  wait_for(stream);  // the driver holds the host until memory that isn't pinned has what it copies
  return to;
}

// -- what torch asks of a device
struct Event {
  Key stream;
  uint64_t at;
  Clock clock;
  std::chrono::steady_clock::time_point time;
  bool asked = false;
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device before(KIND, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(mine(device.index()), "CUDA error: invalid device ordinal");
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index() && mine(device.index())) current = device.index();
  }
  Stream getStream(Device device) const override { return as_stream(stream_of(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return as_stream({index_of(device), 0}); }
  Stream getNewStream(Device device, int) const override {
    Held held;
    DeviceIndex i = index_of(device);
    return as_stream({i, 1 + devices[i].next_stream++ % 32});  // a pool of 32, as CUDA's
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = as_stream(stream_of(stream.device_index()));
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  DeviceIndex deviceCount() const noexcept override { return n_devices; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Held held;
    Key key{stream.device_index(), stream.id()};
    delete static_cast<Event*>(*event);
    *event = new Event{key, launched[key], clock_of(key), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    Held held;
    if (event) merge(seen[{stream.device_index(), stream.id()}], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {  // not at the first time: a device is busy
    Held held;
    auto found = static_cast<Event*>(event);
    if (!found) return true;
    auto done = finished.find(found->stream);
    bool ready = found->asked || (done != finished.end() && done->second >= found->at);
    found->asked = true;
    if (ready) finish(found->clock);
    return ready;
  }
  bool queryStream(const Stream& stream) const override {
    Held held;
    Key key{stream.device_index(), stream.id()};
    auto done = finished.find(key);
    return launched[key] == 0 || (done != finished.end() && done->second >= launched[key]);
  }
  void synchronizeStream(const Stream& stream) const override {
    Held held;
    wait_for({stream.device_index(), stream.id()});
  }
  void synchronizeEvent(void* event) const override {
    Held held;
    if (!event) return;
    auto found = static_cast<Event*>(event);
    devices[found->stream.first].counts.waits++;
    finish(found->clock);
    check_faults();
  }
  void synchronizeDevice(const DeviceIndex i) const override {
    Held held;
    wait_for_device(i < 0 ? current : i);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override { device_memory.recordStream(data, stream); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(second)->time - static_cast<Event*>(first)->time).count();
  }
};
#ifdef SIMULATED_XPU
struct Named : at::XPUHooksInterface {
  bool hasXPU() const override { return true; }
  DeviceIndex getNumGPUs() const override { return n_devices; }
};
#else
struct Named : at::CUDAHooksInterface {
  explicit Named(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return n_devices; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
};
#endif
struct Hooks final : Named {
  using Named::Named;
  void init() const override { check_process(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex i) const override { return devices.at(i).touched; }
  DeviceIndex deviceCount() const override { return n_devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex i) const override { Guard().setDevice(Device(KIND, i)); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return Guard().exchangeDevice(Device(KIND, i)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current : exchangeDevice(i); }
  void deviceSynchronize(DeviceIndex i) const override { Guard().synchronizeDevice(i); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return generator_of(i < 0 ? current : i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    if (i < 0) i = current;
    return adopting ? generator_of(i) : at::make_generator<Random>(i);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    Held held;
    auto after = pinned.upper_bound(data);
    return after != pinned.begin() && data < static_cast<const char*>(std::prev(after)->first) + std::prev(after)->second;
  }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current); }
};

void register_all() {
  c10::impl::registerDeviceGuard(KIND, new Guard);
  c10::SetAllocator(KIND, &device_memory, 255);
  at::setHostAllocator(KIND, &pinned_memory, 255);
  auto& cuda = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::KIND, __FILE__, __LINE__);  // for as long as the process lives
  const std::set<std::string> own{"aten::empty.memory_format", "aten::empty_strided", "aten::copy_", "aten::native_dropout",
                                  "aten::record_stream", "aten::set_.source_Storage_storage_offset",
                                  "aten::set_.source_Storage", "aten::set_.source_Tensor"};
  cuda.impl("empty.memory_format", TORCH_FN(empty));
  cuda.impl("empty_strided", TORCH_FN(empty_strided));
  cuda.impl("copy_", TORCH_FN(copy));
  cuda.impl("native_dropout", TORCH_FN(dropout));
  cuda.impl("record_stream", TORCH_FN(record_stream));
  cuda.impl("set_.source_Storage", TORCH_FN(set_storage));
  cuda.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  cuda.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  cuda.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  cuda.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  cuda.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  cuda.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  auto& sparse = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::SPARSE_KIND, __FILE__, __LINE__);
  sparse.impl("copy_", TORCH_FN(at::native::copy_sparse_wrapper_));
  sparse.impl("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
  const std::set<std::string> own_sparse{"aten::copy_", "aten::copy_sparse_to_sparse_"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU) && !own_sparse.count(c10::toString(name)))
      sparse.impl(c10::toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&boxed>());
    if (own.count(c10::toString(name))) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.name.rfind("aten::_foreach_", 0) == 0)
      cuda.impl(c10::toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&boxed>());
  }
}
struct AtLoad {
  AtLoad() { register_all(); }
} at_load;
}  // namespace simulated

namespace at {
using simulated::Hooks;
#ifdef SIMULATED_XPU
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, Hooks)
#else
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
#endif
}  // namespace at

#ifndef SIMULATED_XPU
#include "collectives.h"
#endif

// -- for Python, by ctypes
using namespace simulated;
thread_local std::string error;
template <class F>
int checked(F work) {  // -1 for an error, which Python raises
  try {
    return work();
  } catch (const c10::Error& found) {
    error = found.what_without_backtrace();
    return -1;
  }
}
extern "C" {
void simulated_devices(int n) { n_devices = n; }
int simulated_count() { return n_devices; }
int simulated_current() { return current; }
void simulated_set(int i) { current = i; }
int64_t simulated_current_stream(int i) { return current_streams[i]; }
void simulated_set_stream(int i, int64_t stream) { current_streams[i] = stream; }
void simulated_counts(int i, int64_t* out) {
  auto& counts = devices[i].counts;
  out[0] = counts.launches, out[1] = counts.waits, out[2] = counts.to_device, out[3] = counts.to_host, out[4] = counts.on_device;
}
void simulated_total(int i, int64_t bytes) { devices[i].total = bytes; }
void simulated_resize(void* storage, int64_t n) {
  Held held;
  auto own = static_cast<c10::StorageImpl*>(storage);
  c10::DeviceGuard guard(own->device());
  c10::DataPtr data = new_block(own->device().index(), n);
  size_t kept = std::min<size_t>(n, own->nbytes());
  if (Block* block = block_of(*own)) block->settle();
  if (kept > 0) std::memcpy(data.get(), own->data(), kept);
  own->set_data_ptr_noswap(std::move(data));
  own->set_nbytes(n);
}
void simulated_trace(int on) { names.clear(), traced = on != 0; }
const char* simulated_names() { return names.c_str(); }
void simulated_adopt(int on) { adopting = on != 0; }
void simulated_start() { owner = getpid(); }
int simulated_forked() { return owner != 0 && owner != getpid(); }
const char* simulated_error() { return error.c_str(); }
int simulated_capture() {  // on the current stream, until simulated_captured; the number of the graph
  Held held;
  return checked([] {
    TORCH_CHECK(capturing == nullptr, "CUDA error: operation would result in a merge of two independent captures");
    graphs.push_back(std::make_unique<Graph>());
    capturing = graphs.back().get();
    capturing->stream = stream_of(current);
    return int(graphs.size()) - 1;
  });
}
void simulated_captured() { capturing = nullptr; }
int simulated_captures() { return captures(stream_of(current)); }
int simulated_replay(int number) {
  Held held;
  return checked([number] {
    check_faults();
    Graph& graph = *graphs.at(number);
    use_memory(stream_of(current), graph.reads, graph.writes, "a CUDA graph");
    count_launch(current, "graph");
    for (auto& again : graph.kernels) again();
    return 0;
  });
}
void simulated_drop(int number) { graphs.at(number) = std::make_unique<Graph>(); }
void simulated_forget() {  // between tests: what one has left unordered is not the next one's
  Held held;
  for (auto& [key, at] : launched) finished[key] = at;
  copies.clear(), faults.clear();
}
}
