// Projection: a linear layer of a decoder with what comes before and after it. rotate_heads, gate_rows.
#include <vector>

#include "bind.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

// y = residual + W f(x) + bias, f being the RMS norm with a weight, SiLU of x's first half times its second, or x.
class Projection {
 public:
  // weight: a matrix, or a list of Packed, whose outputs follow each other. like: a tensor of the type of x and out.
  Projection(nb::object weight, nb::object like, nb::object bias, nb::object norm, float eps, bool is_gated,
             int activations)
      : owners_{weight, bias, norm}, eps_(eps), is_gated_(is_gated), activations_(activations_of(activations)) {
    const Tensor example(like, "like", Tensor::kAnyDims);
    type_ = example.type();
    if (nb::isinstance<nb::list>(weight)) {
      packed_ = PackedGroup(nb::cast<nb::sequence>(weight));
      out_ = packed_.out, in_ = packed_.in;
    } else {
      const Tensor weights(weight, "weight", 2);
      weights.require(weights.is_contiguous() && weights.type() == type_, "is not contiguous in like's dtype");
      weight_ = weights.bytes();
      out_ = weights.size(0), in_ = weights.size(1);
    }
    bias_ = vector_of(bias, "bias", out_, example.element());
    norm_ = vector_of(norm, "norm", in_, example.element());
  }

  void run(nb::handle x, nb::handle residual, nb::handle out) const {
    const Tensor rows(x, "x", 2), result(out, "out", 2);
    rows.require_shape({-1, is_gated_ ? 2 * in_ : in_});
    rows.require(rows.is_contiguous(), "is not contiguous");
    rows.require(rows.type() == type_, "has another dtype than weight");
    const int64_t count = rows.size(0);
    result.require_shape({count, out_});
    result.require(result.is_contiguous() && result.type() == type_, "is not contiguous in weight's dtype");
    const char* added = nullptr;
    if (!residual.is_none()) {
      const Tensor beside(residual, "residual", 2);
      beside.require_shape({count, out_});
      beside.require(beside.is_contiguous() && beside.type() == type_, "is not contiguous in weight's dtype");
      added = beside.bytes();
    }
    nb::gil_scoped_release release;
    static thread_local std::vector<char> scratch;
    const char* from = rows.bytes();
    if (norm_ != nullptr || is_gated_) {
      const size_t needed = (size_t)(count * in_ * size_of(type_));
      if (scratch.size() < needed) scratch.resize(needed);
      if (is_gated_)
        kernels().gate_rows({from, scratch.data(), count, in_, type_});
      else
        kernels().rms_norm({from, norm_, scratch.data(), count, in_, eps_, type_});
      from = scratch.data();
    }
    if (weight_ == nullptr)
      kernels().packed_linear({from, packed_.views.data(), (int64_t)packed_.views.size(), bias_, result.bytes(), count,
                               out_, type_, activations_});
    else
      kernels().linear({from, weight_, bias_, result.bytes(), count, in_, out_, in_, type_});
    if (added != nullptr) kernels().add_rows({added, result.bytes(), count * out_, type_});
  }

 private:
  static const char* vector_of(nb::object object, const char* name, int64_t size, Element element) {
    if (object.is_none()) return nullptr;
    const Tensor vector(object, name, 1);
    vector.require_shape({size});
    return vector.data<char>(element);
  }

  std::vector<nb::object> owners_;
  PackedGroup packed_;
  const char *weight_ = nullptr, *bias_ = nullptr, *norm_ = nullptr;
  float eps_;
  bool is_gated_;
  Activations activations_;
  int64_t in_, out_;
  Type type_;
};

void rotate_heads(nb::handle rows, nb::handle cos, nb::handle sin, nb::handle q_norm, nb::handle k_norm, float eps,
                  int64_t heads, int64_t kv_heads, int64_t dim) {
  const Tensor all(rows, "rows", 2), c(cos, "cos", 2), s(sin, "sin", 2);
  const Element element = all.element();
  all.require(all.is_contiguous(), "is not contiguous");
  all.require(all.size(1) >= (heads + kv_heads) * dim, "has rows that are too short");
  const int64_t turned = c.size(1);
  c.require_shape({all.size(0), turned});
  c.require(turned % 2 == 0 && turned <= dim, "has an odd size or more than the heads'");
  s.require_shape({all.size(0), turned});
  const auto norm_of = [&](nb::handle weight, const char* name) -> const char* {
    if (weight.is_none()) return nullptr;
    const Tensor vector(weight, name, 1);
    vector.require_shape({dim});
    return vector.data<char>(element);
  };
  const RotateArgs args{all.bytes(), c.data<char>(element), s.data<char>(element), norm_of(q_norm, "q_norm"),
                        norm_of(k_norm, "k_norm"), all.size(0), all.size(1), heads, kv_heads, dim, turned, eps,
                        all.type()};
  nb::gil_scoped_release release;
  kernels().rotate_heads(args);
}

void gate_rows(nb::handle x, nb::handle out) {
  const Tensor rows(x, "x", 2), result(out, "out", 2);
  const Element element = rows.element();
  result.require_shape({rows.size(0), rows.size(1) / 2});
  rows.require(rows.size(1) % 2 == 0, "has rows of odd size");
  const GateArgs args{rows.data<char>(element), result.data<char>(element), rows.size(0), rows.size(1) / 2, rows.type()};
  nb::gil_scoped_release release;
  kernels().gate_rows(args);
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<Projection>(m, "Projection")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, float, bool, int>(), nb::arg("weight"),
           nb::arg("like"), nb::arg("bias").none(), nb::arg("norm").none(), nb::arg("eps"), nb::arg("is_gated"),
           nb::arg("activations"))
      .def("run", &Projection::run, nb::arg("x"), nb::arg("residual").none(), nb::arg("out"));
  m.def("rotate_heads", rotate_heads, nb::arg("rows"), nb::arg("cos"), nb::arg("sin"), nb::arg("q_norm").none(),
        nb::arg("k_norm").none(), nb::arg("eps"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("dim"));
  m.def("gate_rows", gate_rows, nb::arg("x"), nb::arg("out"));
}

}  // namespace kvreclaim
