// A simulated accelerator, device "sim": tensors of PrivateUse1 whose bytes are in host memory.
//
// Operators run as kernels of the CPU over the same bytes, after the checks that CUDA makes: a tensor of the CPU beside one of
// "sim" is an error. Each kernel, copy and wait is reported to Python. docs/device.md says what this can and cannot show.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;
using at::Tensor;
using std::nullopt;
using std::optional;
using std::string;
namespace {
constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[DEVICES] = {};

// ------------------------------------------------------------------------------------------------------------ reports
PyObject* hook = nullptr;  // called with a kind and the name of the operator

void report(const char* kind, const string& name) {
  if (hook == nullptr) return;
  py::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(hook, "ss", kind, name.c_str());
  if (result == nullptr) throw py::error_already_set();
  Py_DECREF(result);
}

// ------------------------------------------------------------------------------------------------------------- memory
// As torch.accelerator's allocators: counts live bytes and their peak, in blocks of 512 bytes as CUDA's.
struct Memory {
  std::mutex mutex;
  c10::CachingDeviceAllocator::DeviceStats stats[DEVICES];
  std::unordered_map<void*, std::pair<size_t, int>> blocks;  // bytes and device
  size_t limit = size_t(1) << 34;  // per device
};
Memory& memory() {
  static auto* made = new Memory;  // tensors may be freed after the destructors of statics ran
  return *made;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  auto& m = memory();
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    auto found = m.blocks.find(pointer);
    auto& s = m.stats[found->second.second];
    for (auto* each : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes}) (*each)[0].decrease(found->second.first);
    s.allocation[0].decrease(1);
    m.blocks.erase(found);
  }
  c10::free_cpu(pointer);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(SIM, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto& m = memory();
    std::lock_guard<std::mutex> lock(m.mutex);
    const size_t block = (bytes + 511) / 512 * 512, used = m.stats[current].allocated_bytes[0].current;
    if (used + block > m.limit) {
      m.stats[current].num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes; ", used, " of ", m.limit, " are in use.");
    }
    void* pointer = c10::alloc_cpu(block);
    auto& s = m.stats[current];
    for (auto* each : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes}) (*each)[0].increase(block);
    s.allocation[0].increase(1);
    m.blocks[pointer] = {block, current};
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex i) override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().stats[i];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex i) override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto& s = memory().stats[i];
    for (auto* each : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.allocation}) (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) override {
    const size_t used = getDeviceStats(i).allocated_bytes[0].current;
    return {memory().limit - used, memory().limit};
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

// Pinned host memory is a set of known pointers: what a copy without waiting needs on a GPU.
struct Pinned final : c10::Allocator {
  static std::unordered_set<const void*>& all() { static auto* made = new std::unordered_set<const void*>; return *made; }
  static std::mutex& mutex() { static auto* made = new std::mutex; return *made; }
  static void unpin(void* pointer) {
    { std::lock_guard<std::mutex> lock(mutex()); all().erase(pointer); }
    c10::free_cpu(pointer);
  }
  static bool has(const void* pointer) { std::lock_guard<std::mutex> lock(mutex()); return all().count(pointer) > 0; }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> lock(mutex());
    all().insert(pointer);
    return {pointer, pointer, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Pinned pinned;

// --------------------------------------------------------------------------------------- devices, streams, generators
// Work is done when a call returns, so streams only have names and events only hold a time.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Clock = std::chrono::steady_clock;
  c10::DeviceType type() const override { return SIM; }
  c10::Device getDevice() const override { return {SIM, current}; }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "sim: invalid device ordinal ", (int)d.index());
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  static c10::Stream stream(c10::Device d, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, d.has_index() ? d : c10::Device(SIM, current), id); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getStream(c10::Device d) const override { return stream(d, streams[d.has_index() ? d.index() : current]); }
  c10::Stream getNewStream(c10::Device d, int) const override { static std::atomic<c10::StreamId> next{1}; return stream(d, next++); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override { auto old = getStream(s.device()); streams[s.device_index()] = s.id(); return old; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { report("sync", "synchronize a stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { report("sync", "synchronize a device"); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { report("sync", "synchronize an event"); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Clock::time_point*>(last) - *static_cast<Clock::time_point*>(first)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {  // holds a generator of the CPU, which the kernels get
  at::Generator cpu;
  Generator(c10::DeviceIndex i, at::Generator g)
      : c10::GeneratorImpl(c10::Device(SIM, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }
};
at::Generator new_generator(c10::DeviceIndex i) {
  return at::make_generator<Generator>(i < 0 ? current : i, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({SIM, i}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto old = current; setCurrentDevice(i); return old; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = memory().blocks.find(pointer);
    return {SIM, static_cast<c10::DeviceIndex>(found == memory().blocks.end() ? current : found->second.second)};
  }
  bool isPinnedPtr(const void* pointer) const override { return Pinned::has(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override {
    static std::vector<at::Generator> made = {new_generator(0), new_generator(1)};
    return made[i < 0 ? current : i];
  }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return new_generator(i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::OptionalDeviceGuard guard(storage.device());
    auto fresh = allocator.allocate(bytes);
    if (storage.data() && bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// ------------------------------------------------------------------------------------- one storage, seen as CPU and as sim
bool on_sim(const Tensor& x) { return x.defined() && x.device().type() == SIM; }

Tensor as_cpu(const Tensor& x) {
  if (!on_sim(x)) return x;
  auto impl = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), x.storage().nbytes(), c10::DataPtr(const_cast<void*>(x.storage().data()), c10::kCPU), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(impl), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
  return out;
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, optional<c10::ScalarType> dtype, optional<c10::Layout>,
                     optional<c10::Device> device, optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor empty(c10::IntArrayRef size, optional<c10::ScalarType> dtype, optional<c10::Layout>, optional<c10::Device> device, optional<bool>,
             optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

// A result of a CPU kernel as one of sim: a view of an argument stays a view, anything else is copied into memory of sim.
Tensor as_sim(const Tensor& x, c10::Device device, const std::vector<Tensor>& arguments) {
  for (const auto& from : arguments)
    if (x.storage().data() && x.storage().data() == from.storage().data()) {
      auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(from.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), x.dtype());
      out.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
      out.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
      return out;
    }
  auto out = empty_strided(x.sizes(), x.strides(), x.scalar_type(), nullopt, device, nullopt);
  as_cpu(out).copy_(x);
  return out;
}

// ----------------------------------------------------------------------------------------------- the kernel of most operators
// On CUDA these wait: the shape of the result, or the result itself, is read from the device.
const std::unordered_set<string> WAITING = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::equal", "aten::bincount", "aten::histc", "aten::is_nonzero"};

bool is_generator(const c10::Argument& argument) {
  const auto* optional_type = argument.type()->castRaw<c10::OptionalType>();
  return optional_type && optional_type->getElementType()->kind() == c10::TypeKind::GeneratorType;
}
at::Generator cpu_generator(c10::DeviceIndex i) {  // of a device's own random numbers
  return static_cast<Generator*>(Hooks().getDefaultGenerator(i).unsafeGetGeneratorImpl())->cpu;
}
bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The tensors of an argument, in place; false if it holds none.
template <class F>
bool each_tensor(c10::IValue& value, F change) {
  if (value.isTensor()) value = change(value.toTensor());
  else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(change(x));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<optional<Tensor>> list;
    for (const optional<Tensor>& x : value.toOptionalTensorVector()) list.push_back(x ? optional<Tensor>(change(*x)) : nullopt);
    value = std::move(list);
  } else return false;
  return true;
}

bool takes_cpu_indices(const string& name) {
  return name == "aten::index" || name.rfind("aten::index_put", 0) == 0 || name == "aten::_index_put_impl_" || name.rfind("aten::_unsafe_index", 0) == 0;
}

// Elementwise operators take a number that is a tensor of the CPU; these do not.
const std::unordered_set<string> ALL_ON_DEVICE = {
    "aten::cat", "aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", "aten::scatter_reduce",
    "aten::index_select", "aten::index_add", "aten::index_copy", "aten::index_fill_", "aten::embedding", "aten::mm", "aten::bmm",
    "aten::addmm", "aten::baddbmm", "aten::searchsorted", "aten::bucketize", "aten::take", "aten::nll_loss_forward", "aten::native_layer_norm",
    "aten::masked_select", "aten::masked_scatter_", "aten::repeat_interleave", "aten::isin", "aten::multinomial", "aten::cross",
    "aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_", "aten::clamp_max", "aten::clamp_max_", "aten::logaddexp"};
// cuBLAS has no products of integers.
const std::unordered_set<string> PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::dot", "aten::mv", "aten::addmv"};

// x[mask] = values waits for the positions, x[mask] = 0.0 does not; x[mask] itself has called nonzero before it comes here.
bool waits(const string& name, const string& overload, const c10::IValue* arguments) {
  if (name == "aten::repeat_interleave" && overload == "Tensor") return arguments[1].isNone();
  if (name.find("index_put") != string::npos && arguments[2].toTensor().numel() != 1)
    for (const optional<Tensor>& x : arguments[1].toOptionalTensorVector())
      if (x && x->defined() && (x->scalar_type() == at::kBool || x->scalar_type() == at::kByte)) return true;
  return WAITING.count(name) > 0;
}

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name();
  const size_t count = schema.arguments().size();
  c10::IValue* arguments = stack->data() + stack->size() - count;
  optional<c10::Device> device;
  bool any = false, cpu = false;
  for (size_t i = 0; i < count; i++) {
    const bool written = writes(schema.arguments()[i]);
    auto check = [&](const Tensor& x) {
      if (on_sim(x)) {
        TORCH_CHECK(!any || *device == x.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", x.device(), "! (in ", name, ")");
        device = x.device();
        any = true;
        TORCH_CHECK(!PRODUCTS.count(name) || x.is_floating_point() || x.is_complex(), name, " has no kernel for ", x.scalar_type(), " on an accelerator");
      } else if (x.defined() && x.device().is_cpu() && (x.dim() > 0 || written || ALL_ON_DEVICE.count(name))) cpu = true;
      return x;
    };
    if (!each_tensor(arguments[i], check) && arguments[i].isDevice() && arguments[i].toDevice().type() == SIM && !device) device = arguments[i].toDevice();
  }
  if (cpu && any) {
    TORCH_CHECK(takes_cpu_indices(name), "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (in ", name, ")");
    if (name != "aten::index") report("h2d", name + " (indices)");  // the checks of index have copied its own
  }
  report(waits(name, schema.overload_name(), arguments) ? "sync" : "kernel", name);

  std::vector<Tensor> originals, aliases;  // aliases[i] is originals[i] as a tensor of the CPU
  for (size_t i = 0; i < count; i++) {
    auto& value = arguments[i];
    const bool written = writes(schema.arguments()[i]);
    auto alias = [&](const Tensor& x) {
      if (!on_sim(x)) return x;
      originals.push_back(x);
      aliases.push_back(written && x.numel() == 0 ? at::empty(x.sizes(), x.options().device(at::kCPU)) : as_cpu(x));
      return aliases.back();
    };
    if (each_tensor(value, alias)) continue;
    if (value.isDevice() && value.toDevice().type() == SIM) value = c10::Device(c10::kCPU);
    else if (value.isNone() && device && is_generator(schema.arguments()[i])) value = cpu_generator(device->index());
    else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      if (auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl())) value = own->cpu;
      else TORCH_CHECK(!generator.defined() || !any, "Expected a '", *device, "' device type for generator but found 'cpu'");
    }
  }
  if (name == "aten::histc") {  // CUDA counts integers too
    auto x = arguments[0].toTensor();
    if (!x.is_floating_point()) arguments[0] = x.to(at::kFloat);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (size_t i = 0; i < aliases.size(); i++)  // an empty output that the kernel has resized
    if (originals[i].numel() == 0 && aliases[i].numel() > 0) {
      at::native::resize_(originals[i], aliases[i].sizes(), nullopt);
      as_cpu(originals[i]).copy_(aliases[i]);
    }
  auto back = [&](const Tensor& x) -> Tensor {
    if (!x.defined() || !device) return x;
    for (size_t i = 0; i < aliases.size(); i++)
      if (aliases[i].is_same(x)) return originals[i];
    return as_sim(x, *device, originals);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) each_tensor((*stack)[i], back);
}

// -------------------------------------------------------------------------------------------------------------- copies
// Only pinned memory of the host is copied without waiting.
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (self.numel()) {
    const auto& host = on_sim(dst) ? self : dst;
    const bool async = non_blocking && !on_sim(host) && Pinned::has(host.storage().data());
    if (on_sim(self) && on_sim(dst)) report("kernel", "aten::copy_");
    else if (on_sim(dst)) report(async ? "h2d_async" : "h2d", "copy to the device");
    else report(async ? "d2h_async" : "sync", "copy to the host");
  }
  as_cpu(dst).copy_(as_cpu(self));
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  at::native::resize_(dst, self.sizes(), nullopt);
  return copy_from(self, dst, false);
}
at::Scalar item(const Tensor& self) { report("sync", "item"); return as_cpu(self).item(); }

// --------------------------------------------------------------------------------------------------------------- views
Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, optional<int64_t> offset) { return at::native::as_strided_tensorimpl(self, size, stride, offset); }
Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
const Tensor& resize(const Tensor& self, c10::IntArrayRef size, optional<at::MemoryFormat> format) { return at::native::resize_(self, size, format); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_strided(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}
// `parameter.data = tensor` between devices, as CUDA and the CPU allow it.
bool can_take_data(const Tensor&, const Tensor&) { return true; }
void record_stream(Tensor&, c10::Stream) {}

// ----------------------------------------------------------------------------------------------------------- attention
int64_t attention_choice(const Tensor& query, const Tensor&, const Tensor&, const optional<Tensor>&, double dropout, bool, optional<double>, bool) {
  const bool fused = !query.is_nested() && query.dim() == 4 && dropout == 0.0 && at::globalContext().userEnabledOverrideableSDP();
  return static_cast<int64_t>(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

struct Attention {  // in float32 or wider; heads of keys and values repeated to those of the queries
  Tensor q, k, v, logsumexp, weights;
  double scale;
  int64_t groups;
  Attention(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& bias, bool causal, optional<double> given) {
    auto wide = [](const Tensor& x) { return as_cpu(x).to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat); };
    groups = query.size(1) / key.size(1);
    q = wide(query), k = wide(key).repeat_interleave(groups, 1), v = wide(value).repeat_interleave(groups, 1);
    scale = given.value_or(1.0 / std::sqrt(query.size(-1)));
    auto scores = q.matmul(k.transpose(-2, -1)) * scale;
    if (bias && bias->defined()) scores = scores + wide(*bias);
    if (causal) scores = scores.masked_fill(at::ones({q.size(2), k.size(2)}, at::kBool).tril().logical_not(), -INFINITY);
    logsumexp = scores.logsumexp(-1);
    weights = (scores - logsumexp.unsqueeze(-1)).exp().masked_fill(logsumexp.isinf().unsqueeze(-1), 0.0);  // 0 where all is masked
  }
  Tensor ungrouped(const Tensor& grad) const { return grad.unflatten(1, {grad.size(1) / groups, groups}).sum(2); }
};

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
Forward attention(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& bias, double, bool causal, bool, optional<double> scale) {
  report("kernel", "scaled_dot_product_attention");
  const Attention a(query, key, value, bias, causal, scale);
  const auto out = a.weights.matmul(a.v).to(query.scalar_type()).transpose(1, 2).contiguous().transpose(1, 2);
  return {as_sim(out, query.device(), {}), as_sim(a.logsumexp, query.device(), {}), Tensor(), Tensor(), query.size(2), key.size(2), Tensor(), Tensor(), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, std::array<bool, 4> wanted,
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, double, bool causal, const Tensor&, const Tensor&, optional<double> scale) {
  report("kernel", "scaled_dot_product_attention backward");
  const Attention a(query, key, value, bias, causal, scale);
  const auto grad = as_cpu(grad_out).to(a.q.scalar_type());
  const auto of_weights = grad.matmul(a.v.transpose(-2, -1));
  const auto of_scores = a.weights * (of_weights - (of_weights * a.weights).sum(-1, true));
  auto give = [&](bool want, const Tensor& like, auto compute) { return want && like.defined() ? as_sim(compute().to(like.scalar_type()), query.device(), {}) : Tensor(); };
  return {give(wanted[0], query, [&] { return of_scores.matmul(a.k) * a.scale; }),
          give(wanted[1], key, [&] { return a.ungrouped(of_scores.transpose(-2, -1).matmul(a.q) * a.scale); }),
          give(wanted[2], value, [&] { return a.ungrouped(a.weights.transpose(-2, -1).matmul(grad)); }),
          give(wanted[3], bias, [&] { return at::sum_to(of_scores, bias.sizes()); })};
}

// Strided nested tensors: torch's kernels call operators on the buffer, and serve every device.
void nested(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::NestedTensorCPU), stack);
}
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&nested>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("_has_compatible_shallow_copy_type", can_take_data);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  // Of these the CPU and CUDA have kernels, which a composite one would hide here.
  for (const char* name : {"repeat_interleave.Tensor", "native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the lists of CUDA
  using namespace at::autocast;
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define WIDER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(WIDER)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_hook", [](py::object f) { PyObject* old = hook; hook = f.is_none() ? nullptr : f.inc_ref().ptr(); Py_XDECREF(old); });
  m.def("set_limit", [](size_t bytes) { std::lock_guard<std::mutex> lock(memory().mutex); memory().limit = bytes; });
  m.def("device_count", [] { return DEVICES; });
  m.def("default_generator", [](int i) { return Hooks().getDefaultGenerator(i); });
}
