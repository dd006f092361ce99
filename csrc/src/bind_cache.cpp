// Tensor views, Cache, write_kv, gather_tokens.
#include <nanobind/stl/array.h>

#include <array>
#include <iterator>
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
    case 2 * 256 + 16: return Element::kF16;
    case 1 * 256 + 8: return Element::kU8;
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

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (int i = 0; i < tensor_.ndim; ++i) count *= tensor_.shape[i];
  return count;
}

Type Tensor::type() const {
  require(element_ == Element::kF32 || element_ == Element::kBF16, "is neither float32 nor bfloat16");
  return element_ == Element::kF32 ? Type::kF32 : Type::kBF16;
}

Type Tensor::row_type() const {
  if (element_ == Element::kF16) return Type::kF16;
  require(element_ == Element::kF32 || element_ == Element::kBF16, "is neither float32, bfloat16 nor float16");
  return type();
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

RowsView rows_view(const Tensor& x) { return {x.bytes(), x.stride(0), x.stride(1), x.stride(2), x.row_type()}; }

namespace {

Element element_of(Format format) {
  return format == Format::kF32 ? Element::kF32 : format == Format::kBF16 ? Element::kBF16 : Element::kF16;
}

// The first byte of a plane [L, B, K, ...] whose blocks of a head are contiguous and equally far apart, and how many
// bytes that is.
char* plane_data(const Tensor& plane, Format format, int64_t* stride) {
  plane.require(plane.element() == element_of(format), "has another dtype than the kernel takes");
  int64_t next = 1;
  for (int i = plane.ndim() - 1; i >= 3; --i) {
    plane.require(plane.stride(i) == next || plane.size(i) == 1, "has blocks that are not contiguous");
    next *= plane.size(i);
  }
  int64_t apart = 0, between = 1;
  for (int i = 2; i >= 0; --i) {
    if (plane.size(i) > 1 && apart == 0) apart = plane.stride(i) / between;
    plane.require(plane.size(i) <= 1 || plane.stride(i) == apart * between, "has blocks that are not equally far apart");
    between *= plane.size(i);
  }
  *stride = (apart == 0 ? next : apart) * size_of(format);
  return plane.bytes();
}

void add_plain(CacheView& view, const Tensor& keys, const Tensor& values) {
  const int64_t size = view.block_size;
  values.require_shape({view.layers, view.blocks, view.heads, size, view.v_dim});
  if (view.formats.k == Format::kF32)
    keys.require_shape({view.layers, view.blocks, view.heads, view.k_dim, size});
  else
    keys.require_shape({view.layers, view.blocks, view.heads, view.k_dim / 2, size, 2});
  view.k = plane_data(keys, view.formats.k, &view.k_stride);
  view.v = plane_data(values, view.formats.v, &view.v_stride);
}

const float* sign_data(nb::handle signs, const char* name, int64_t dim) {
  const Tensor tensor(signs, name, 1);
  tensor.require_shape({dim});
  return tensor.data<float>(Element::kF32);
}

// `dims`: L, B, K, S, D, Dv. `planes`: keys and values of a plain format, the units of a coded one.
void init_cache(Cache* self, int format, const std::array<int64_t, 6>& dims, bool latent, nb::list planes,
                nb::object signs) {
  CacheView view{};
  view.layers = dims[0], view.blocks = dims[1], view.heads = dims[2], view.block_size = dims[3];
  view.k_dim = dims[4], view.v_dim = dims[5];
  if (format < 0 || format >= (int)std::size(kCacheFormats)) throw nb::value_error("format is none of layout.h");
  view.formats = kCacheFormats[format];
  view.latent = latent;
  if (view.block_size % 16 != 0 || view.block_size <= 0)
    throw nb::value_error("the block size is no multiple of 16");
  if (view.v_dim % 8 != 0 || view.k_dim % 8 != 0) throw nb::value_error("a head dim is no multiple of 8");
  if (planes.size() != (is_plain(view.formats) ? 2 : 1)) throw nb::value_error("planes has another number of tensors");
  if (is_plain(view.formats)) {
    add_plain(view, Tensor(planes[0], "k", view.formats.k == Format::kF32 ? 5 : 6), Tensor(planes[1], "v", 5));
  } else {
    const Tensor units(planes[0], "data", 4);
    units.require_shape({view.layers, view.blocks, view.heads, unit_bytes(view)});
    view.data = units.data<char>(Element::kU8);
  }
  if (is_rotated(view.formats.k) || is_rotated(view.formats.v)) {
    const auto both = nb::cast<nb::tuple>(signs);
    view.k_signs = sign_data(both[0], "k_signs", view.k_dim);
    view.v_signs = sign_data(both[1], "v_signs", view.v_dim);
  }
  new (self) Cache{view, {planes, std::move(signs)}};
}

void check_layer(const Cache& cache, int64_t layer) {
  if (layer < 0 || layer >= cache.view.layers) throw nb::index_error("layer is outside the cache");
}

void write(const Cache& cache, int64_t layer, nb::handle k, nb::handle v, nb::handle slot_mapping) {
  const CacheView& view = cache.view;
  const Tensor keys(k, "k", 3), values(v, "v", 3), slots(slot_mapping, "slot_mapping", 1);
  check_layer(cache, layer);
  keys.require_shape({slots.size(0), view.heads, head_dim(view)});
  values.require_shape({slots.size(0), view.heads, view.v_dim});
  const int64_t* to = slots.data<int64_t>(Element::kI64);
  for (int64_t t = 0; t < slots.size(0); ++t)
    slots.require(to[t] >= 0 && to[t] < view.blocks * view.block_size, "names a slot outside the cache");
  WriteArgs args{view, layer, rows_view(keys), rows_view(values), to, slots.size(0)};
  if (view.latent) args.k.data += view.v_dim * args.k.stride_d * size_of(args.k.type);
  nb::gil_scoped_release release;
  kernels().write_kv(args);
}

void gather(const Cache& cache, int64_t layer, nb::handle block_ids, nb::handle k, nb::handle v) {
  const CacheView& view = cache.view;
  const Tensor ids(block_ids, "block_ids", 1), keys(k, "k", 3), values(v, "v", 3);
  check_layer(cache, layer);
  const int64_t tokens = keys.size(1);
  keys.require_shape({view.heads, tokens, head_dim(view)});
  values.require_shape({view.heads, tokens, view.v_dim});
  ids.require(tokens <= ids.size(0) * view.block_size, "has too few blocks for these tokens");
  const int64_t* from = ids.data<int64_t>(Element::kI64);
  for (int64_t i = 0; i < ids.size(0); ++i)
    ids.require(from[i] >= 0 && from[i] < view.blocks, "names a block outside the cache");
  const Element element = is_plain(view.formats) ? element_of(view.formats.k) : Element::kF32;
  const GatherArgs args{view, layer, from, tokens, keys.data<char>(element), values.data<char>(element)};
  nb::gil_scoped_release release;
  kernels().gather_tokens(args);
}

// [K, ..., D] of the element of `like`, contiguous; null for None.
const char* constants(nb::handle object, const char* name, std::initializer_list<int64_t> shape, Element element) {
  if (object.is_none()) return nullptr;
  const Tensor tensor(object, name, (int)shape.size());
  tensor.require_shape(shape);
  return tensor.data<char>(element);
}

void transform_rows(nb::handle x, nb::handle factor, nb::handle offset, nb::handle directions, nb::handle added,
                    nb::handle out) {
  const Tensor rows(x, "rows", 3), scale(factor, "factor", 2), result(out, "out", 3);
  const int64_t heads = scale.size(0), dim = rows.size(2);
  const int64_t count = directions.is_none() ? 0 : Tensor(directions, "directions", 3).size(1);
  const Element element = scale.element();
  rows.require(dim % 8 == 0, "has a head dim that is no multiple of 8");
  rows.require(heads > 0 && rows.size(1) % heads == 0, "has heads that are no multiple of the KV heads");
  rows.require(rows.stride(2) == 1, "has numbers of a row that lie apart");
  result.require_shape({rows.size(0), rows.size(1), dim});
  result.require(result.element() == rows.element() && result.stride(2) == 1, "is no place for such rows");
  if (directions.is_none() != added.is_none()) throw nb::value_error("directions and added come together");
  const TransformArgs args{rows_view(rows),
                           rows_view(result),
                           constants(factor, "factor", {heads, dim}, element),
                           constants(offset, "offset", {heads, dim}, element),
                           constants(directions, "directions", {heads, count, dim}, element),
                           constants(added, "added", {heads, count, dim}, element),
                           scale.row_type(),
                           rows.size(0),
                           heads,
                           rows.size(1) / heads,
                           dim,
                           count};
  nb::gil_scoped_release release;
  kernels().transform_rows(args);
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
  nb::class_<Cache>(m, "Cache")
      .def("__init__", init_cache, nb::arg("format"), nb::arg("dims"), nb::arg("latent"), nb::arg("planes"),
           nb::arg("signs").none());
  m.def("write_kv", write);
  m.def("gather_tokens", gather);
  m.def("transform_rows", transform_rows, nb::arg("rows"), nb::arg("factor"), nb::arg("offset").none(),
        nb::arg("directions").none(), nb::arg("added").none(), nb::arg("out"));
  m.def("advise_huge_pages", advise_huge_pages);
}

}  // namespace kvreclaim
