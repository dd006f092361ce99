// linear: y = x W^T + bias. rms_norm, rms_norm_from_one.
#include "bind.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

// The leading dims of a [..., K] tensor as one: the number of rows and the elements from one to the next.
struct Rows {
  int64_t count = 1, stride;

  explicit Rows(const Tensor& tensor) : stride(tensor.size(tensor.ndim() - 1)) {
    const int last = tensor.ndim() - 1;
    tensor.require(tensor.size(last) <= 1 || tensor.stride(last) == 1, "has no unit stride in its last dim");
    for (int i = last - 1; i >= 0; --i) {
      if (tensor.size(i) == 1) continue;
      if (tensor.size(i) == 0) {
        count = 0;
        return;
      }
      if (count == 1) stride = tensor.stride(i);
      tensor.require(tensor.stride(i) == count * stride, "has rows that are not evenly spaced");
      count *= tensor.size(i);
    }
  }
};

void linear(nb::handle x, nb::handle weight, nb::handle bias, nb::handle out) {
  const Tensor rows(x, "x", Tensor::kAnyDims), weights(weight, "weight", 2), result(out, "out", Tensor::kAnyDims);
  rows.require(rows.ndim() > 0 && rows.size(rows.ndim() - 1) == weights.size(1), "has rows of another size than weight");
  result.require(result.ndim() > 0 && result.size(result.ndim() - 1) == weights.size(0), "has rows of the wrong size");
  const Rows from(rows), to(result);
  const Type type = weights.type();
  rows.require(rows.element() == weights.element(), "has another dtype than weight");
  result.require(result.element() == weights.element(), "has another dtype than weight");
  weights.require(weights.is_contiguous(), "is not contiguous");
  result.require(result.is_contiguous(), "is not contiguous");
  result.require(to.count == from.count, "has another number of rows than x");
  const char* bias_data = nullptr;
  if (!bias.is_none()) {
    const Tensor vector(bias, "bias", 1);
    vector.require_shape({weights.size(0)});
    bias_data = vector.data<char>(weights.element());
  }
  const LinearArgs args{rows.bytes(), weights.bytes(), bias_data,       result.bytes(), from.count,
                        weights.size(1), weights.size(0), from.stride, type};
  nb::gil_scoped_release release;
  kernels().linear(args);
}

template <bool kFromOne>
void rms_norm(nb::handle x, nb::handle weight, float eps, nb::handle out) {
  const Tensor rows(x, "x", Tensor::kAnyDims), weights(weight, "weight", 1), result(out, "out", Tensor::kAnyDims);
  rows.require(rows.ndim() > 0 && rows.size(rows.ndim() - 1) == weights.size(0), "has rows of another size than weight");
  rows.require(rows.is_contiguous(), "is not contiguous");
  rows.require(rows.element() == weights.element(), "has another dtype than weight");
  result.require(result.ndim() == rows.ndim(), "has another shape than x");
  for (int i = 0; i < rows.ndim(); ++i) result.require(result.size(i) == rows.size(i), "has another shape than x");
  int64_t count = 1;
  for (int i = 0; i + 1 < rows.ndim(); ++i) count *= rows.size(i);
  const RmsNormArgs args{rows.bytes(), weights.data<char>(rows.element()), result.data<char>(rows.element()), count,
                         weights.size(0), eps, rows.type()};
  nb::gil_scoped_release release;
  kFromOne ? kernels().rms_norm_from_one(args) : kernels().rms_norm(args);
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear", linear, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("out"));
  const auto norm = [&m](const char* name, auto function) {
    m.def(name, function, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"));
  };
  norm("rms_norm", rms_norm<false>);
  norm("rms_norm_from_one", rms_norm<true>);
}

}  // namespace kvreclaim
