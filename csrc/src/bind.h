// What the bindings share. Tensors come in over DLPack; Python has checked shapes and dtypes in words a
// user understands, so the checks here only keep a caller's mistake from touching memory.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <vector>

#include "dlpack.h"
#include "kvreclaim/layout.h"
#include "kvreclaim/packed.h"

namespace kvreclaim {

namespace nb = nanobind;

enum class Element { kF32, kBF16, kF16, kU8, kI32, kI64, kOther };

// A view of a CPU tensor, valid while the Python object lives.
class Tensor {
 public:
  static constexpr int kAnyDims = -1;

  // Throws TypeError for what is no CPU tensor, ValueError for a wrong number of dims.
  Tensor(nb::handle object, const char* name, int ndim);

  int ndim() const { return tensor_.ndim; }
  int64_t size(int dim) const { return tensor_.shape[dim]; }
  int64_t stride(int dim) const { return strides_[dim]; }
  Element element() const { return element_; }
  bool is_contiguous() const;
  int64_t numel() const;

  // First byte / first element; throws TypeError if the elements are others, ValueError if contiguity is
  // required and not there.
  char* bytes() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }
  template <class E>
  E* data(Element element) const {
    require(element_ == element, "has another dtype than the kernel takes");
    require(is_contiguous(), "is not contiguous");
    return reinterpret_cast<E*>(bytes());
  }

  // fp32 or bf16; rows may be fp16, too.
  Type type() const;
  Type row_type() const;

  // Throws ValueError "<name> <what>".
  void require(bool condition, const char* what) const;
  // All dims at once; -1 is any.
  void require_shape(std::initializer_list<int64_t> shape) const;

 private:
  static constexpr int kMaxDims = 8;
  nb::dlpack::dltensor tensor_;
  int64_t strides_[kMaxDims];
  Element element_;
  const char* name_;
};

// Throws ValueError for a number that is no kind.
Activations activations_of(int kind);

// A [T, H, D] tensor with any strides.
RowsView rows_view(const Tensor& tensor);

// A cache's dims, and its tensors, kept alive; made once per KVCache.
struct Cache {
  CacheView view;
  std::vector<nb::object> owners;
};

// A packed matrix and its tensors, kept alive.
struct Packed {
  Packed(int codes, int grid, nb::object data, nb::object scales, nb::object offsets, nb::object supers,
         nb::object table, int64_t out, int64_t in, int64_t group);

  PackedMatrix view;
  std::vector<nb::object> owners;
};

// Packed matrices that share their input; `matrices` are Packed.
struct PackedGroup {
  PackedGroup() = default;
  explicit PackedGroup(nb::sequence matrices);

  std::vector<const PackedMatrix*> views;
  std::vector<nb::object> owners;
  int64_t in = 0, out = 0;
};

void bind_cache(nb::module_& m);      // Cache, write_kv, gather_tokens, advise_huge_pages
void bind_attention(nb::module_& m);  // Batch, paged_attention, column_sums
void bind_linear(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_packed(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_scoring(nb::module_& m);
void bind_compact(nb::module_& m);

}  // namespace kvreclaim
