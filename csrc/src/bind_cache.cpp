// Tensor views, Cache, write_kv, gather_tokens.
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "bind.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

// torch's exchange table; looked up once, torch is never unloaded.
const DLPackExchange& exchange_of(nb::handle object, const char* name) {
  static PyObject* known_type = nullptr;
  static const DLPackExchange* known = nullptr;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  if (type == known_type) return *known;
  if (!nb::hasattr(type, "__dlpack_c_exchange_api__"))
    throw nb::type_error((std::string(name) + " is no tensor with DLPack's C exchange API").c_str());
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__");
  auto* table = static_cast<DLPackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw nb::python_error();
  if (table->header.version.major != 1 || table->view_object == nullptr)
    throw nb::type_error("this torch speaks another DLPack than version 1");
  known_type = type;
  known = table;
  return *known;
}

Element element_of(const nb::dlpack::dtype& type) {
  if (type.lanes != 1) return Element::kOther;
  switch (type.code * 256 + type.bits) {
    case 2 * 256 + 32: return Element::kF32;
    case 4 * 256 + 16: return Element::kBF16;
    case 6 * 256 + 8: return Element::kBool;
    case 0 * 256 + 32: return Element::kI32;
    case 0 * 256 + 64: return Element::kI64;
    default: return Element::kOther;
  }
}

}  // namespace

Tensor::Tensor(nb::handle object, const char* name, int ndim) : name_(name) {
  if (exchange_of(object, name).view_object(object.ptr(), &tensor_) != 0) throw nb::python_error();
  if (tensor_.device.device_type != nb::device::cpu::value)
    throw nb::type_error((std::string(name) + " is not in CPU memory").c_str());
  require((ndim == kAnyDims || tensor_.ndim == ndim) && tensor_.ndim <= kMaxDims, "has the wrong number of dims");
  element_ = element_of(tensor_.dtype);
  int64_t next = 1;
  for (int i = tensor_.ndim - 1; i >= 0; --i) {
    strides_[i] = tensor_.strides != nullptr ? tensor_.strides[i] : next;
    next *= tensor_.shape[i];
  }
}

bool Tensor::is_contiguous() const {
  int64_t next = 1;
  for (int i = tensor_.ndim - 1; i >= 0; --i) {
    if (tensor_.shape[i] == 0) return true;  // nothing to read, whatever the strides
    if (tensor_.shape[i] != 1 && strides_[i] != next) return false;
    next *= tensor_.shape[i];
  }
  return true;
}

Type Tensor::type() const {
  require(element_ == Element::kF32 || element_ == Element::kBF16, "is neither float32 nor bfloat16");
  return element_ == Element::kF32 ? Type::kF32 : Type::kBF16;
}

void Tensor::require(bool condition, const char* what) const {
  if (!condition) throw nb::value_error((std::string(name_) + " " + what).c_str());
}

void Tensor::require_shape(std::initializer_list<int64_t> shape) const {
  int i = 0;
  for (int64_t size : shape) {
    require(size < 0 || this->size(i) == size, "has a shape that does not fit the other arguments");
    ++i;
  }
}

RowsView rows_view(const Tensor& x) { return {x.bytes(), x.stride(0), x.stride(1), x.stride(2), x.type()}; }

namespace {

void init_cache(Cache* self, nb::object k, nb::object v) {
  const Tensor values(v, "v", 5);
  const Type type = values.type();
  const Tensor keys(k, "k", type == Type::kBF16 ? 6 : 5);
  const int64_t dims = type == Type::kBF16 ? 2 * keys.size(3) : keys.size(3);
  CacheView view{keys.bytes(), values.bytes(), values.size(0), values.size(1), values.size(2), values.size(3),
                 dims, values.size(4), type};
  keys.require(keys.element() == values.element(), "has another dtype than v");
  keys.require(keys.is_contiguous(), "is not contiguous");
  values.require(values.is_contiguous(), "is not contiguous");
  values.require(view.block_size % 16 == 0 && view.block_size > 0, "has a block size that is no multiple of 16");
  values.require(view.v_dim % 8 == 0 && view.k_dim % 8 == 0, "has head dims that are no multiples of 8");
  if (type == Type::kBF16)
    keys.require_shape({view.layers, view.blocks, view.heads, -1, view.block_size, 2});
  else
    keys.require_shape({view.layers, view.blocks, view.heads, -1, view.block_size});
  new (self) Cache{std::move(k), std::move(v), view};
}

void check_layer(const Cache& cache, int64_t layer) {
  if (layer < 0 || layer >= cache.view.layers) throw nb::index_error("layer is outside the cache");
}

void write(const Cache& cache, int64_t layer, nb::handle k, nb::handle v, nb::handle slot_mapping) {
  const CacheView& view = cache.view;
  const Tensor keys(k, "k", 3), values(v, "v", 3), slots(slot_mapping, "slot_mapping", 1);
  check_layer(cache, layer);
  keys.require_shape({slots.size(0), view.heads, view.k_dim});
  values.require_shape({slots.size(0), view.heads, view.v_dim});
  const int64_t* to = slots.data<int64_t>(Element::kI64);
  for (int64_t t = 0; t < slots.size(0); ++t)
    slots.require(to[t] >= 0 && to[t] < view.blocks * view.block_size, "names a slot outside the cache");
  const WriteArgs args{view, layer, rows_view(keys), rows_view(values), to, slots.size(0)};
  nb::gil_scoped_release release;
  kernels().write_kv(args);
}

void gather(const Cache& cache, int64_t layer, nb::handle block_ids, nb::handle k, nb::handle v) {
  const CacheView& view = cache.view;
  const Tensor ids(block_ids, "block_ids", 1), keys(k, "k", 3), values(v, "v", 3);
  check_layer(cache, layer);
  const int64_t tokens = keys.size(1);
  keys.require_shape({view.heads, tokens, view.k_dim});
  values.require_shape({view.heads, tokens, view.v_dim});
  ids.require(tokens <= ids.size(0) * view.block_size, "has too few blocks for these tokens");
  const int64_t* from = ids.data<int64_t>(Element::kI64);
  for (int64_t i = 0; i < ids.size(0); ++i)
    ids.require(from[i] >= 0 && from[i] < view.blocks, "names a block outside the cache");
  const Element element = view.type == Type::kF32 ? Element::kF32 : Element::kBF16;
  const GatherArgs args{view, layer, from, tokens, keys.data<char>(element), values.data<char>(element)};
  nb::gil_scoped_release release;
  kernels().gather_tokens(args);
}

// Asks the system for huge pages under a large tensor: random blocks otherwise miss the TLB once each.
void advise_huge_pages(uintptr_t address, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<Cache>(m, "Cache").def("__init__", init_cache, nb::arg("k"), nb::arg("v"));
  m.def("write_kv", write);
  m.def("gather_tokens", gather);
  m.def("advise_huge_pages", advise_huge_pages);
}

}  // namespace kvreclaim
