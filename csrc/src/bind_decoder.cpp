// Projection: a linear layer of a decoder with what comes before and after it. DecoderLayer. rotate_heads, gate_rows.
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
    const int64_t count = rows.size(0);
    const char* from = checked(rows, count, width());
    const char* added = residual.is_none() ? nullptr : checked(Tensor(residual, "residual", 2), count, out_);
    char* to = checked(result, count, out_);
    nb::gil_scoped_release release;
    compute(from, count, added, to);
  }

  // x [count, width()], residual [count, outputs()] or null -> out [count, outputs()].
  void compute(const char* x, int64_t count, const char* residual, char* out) const {
    static thread_local std::vector<char> scratch;
    if (norm_ != nullptr || is_gated_) {
      char* own = room(scratch, count * in_);
      if (is_gated_)
        kernels().gate_rows({x, own, count, in_, type_});
      else
        kernels().rms_norm({x, norm_, own, count, in_, eps_, type_});
      x = own;
    }
    if (weight_ == nullptr)
      kernels().packed_linear(
          {x, packed_.views.data(), (int64_t)packed_.views.size(), bias_, out, count, out_, type_, activations_});
    else
      kernels().linear({x, weight_, bias_, out, count, in_, out_, in_, type_});
    if (residual != nullptr) kernels().add_rows({residual, out, count * out_, type_});
  }

  int64_t width() const { return is_gated_ ? 2 * in_ : in_; }
  int64_t outputs() const { return out_; }
  Type type() const { return type_; }

  // The tensor's bytes; throws unless it is [count, size], contiguous, of the weight's dtype.
  char* checked(const Tensor& tensor, int64_t count, int64_t size) const {
    tensor.require_shape({count, size});
    tensor.require(tensor.is_contiguous() && tensor.type() == type_, "is not contiguous in weight's dtype");
    return tensor.bytes();
  }

  // Room for so many numbers in a buffer that only grows.
  char* room(std::vector<char>& scratch, int64_t numbers) const {
    const size_t needed = (size_t)(numbers * size_of(type_));
    if (scratch.size() < needed) scratch.resize(needed);
    return scratch.data();
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

RotateArgs rotate_args(const Tensor& all, nb::handle cos, nb::handle sin, nb::handle q_norm, nb::handle k_norm,
                       float eps, int64_t heads, int64_t kv_heads, int64_t dim) {
  const Tensor c(cos, "cos", 2), s(sin, "sin", 2);
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
  return {all.bytes(), c.data<char>(element), s.data<char>(element), norm_of(q_norm, "q_norm"),
          norm_of(k_norm, "k_norm"), all.size(0), all.size(1), heads, kv_heads, dim, turned, eps, all.type()};
}

void rotate_heads(nb::handle rows, nb::handle cos, nb::handle sin, nb::handle q_norm, nb::handle k_norm, float eps,
                  int64_t heads, int64_t kv_heads, int64_t dim) {
  const RotateArgs args = rotate_args(Tensor(rows, "rows", 2), cos, sin, q_norm, k_norm, eps, heads, kv_heads, dim);
  nb::gil_scoped_release release;
  kernels().rotate_heads(args);
}

// What a decoder layer computes before its attention, and behind it, each in one call.
class DecoderLayer {
 public:
  DecoderLayer(nb::object qkv, nb::object out, nb::object gate_up, nb::object down, nb::object q_norm,
               nb::object k_norm, float eps, int64_t heads, int64_t kv_heads, int64_t dim)
      : owners_{qkv, out, gate_up, down}, q_norm_(q_norm), k_norm_(k_norm), eps_(eps), heads_(heads),
        kv_heads_(kv_heads), dim_(dim) {
    const Projection** parts[] = {&qkv_, &out_, &gate_up_, &down_};
    for (size_t i = 0; i < owners_.size(); ++i) *parts[i] = nb::cast<const Projection*>(owners_[i]);
    const bool fit = gate_up_->width() == out_->outputs() && down_->width() == gate_up_->outputs() &&
                     down_->outputs() == out_->outputs() && qkv_->width() == out_->outputs() &&
                     out_->type() == gate_up_->type() && out_->type() == down_->type() && out_->type() == qkv_->type();
    if (!fit) throw nb::value_error("the projections of a layer do not follow each other");
  }

  // x [T, hidden] -> rows [T, (H + 2 K) D]: queries and keys, rotated, and values.
  void before(nb::handle x, nb::handle cos, nb::handle sin, nb::handle rows) const {
    const Tensor from(x, "x", 2), to(rows, "rows", 2);
    const int64_t count = from.size(0);
    const char* read = qkv_->checked(from, count, qkv_->width());
    char* written = qkv_->checked(to, count, qkv_->outputs());
    const RotateArgs turn = rotate_args(to, cos, sin, q_norm_, k_norm_, eps_, heads_, kv_heads_, dim_);
    nb::gil_scoped_release release;
    qkv_->compute(read, count, nullptr, written);
    kernels().rotate_heads(turn);
  }

  // attended [T, H Dv], x [T, hidden] -> out [T, hidden]: x + output projection, and the MLP's sum.
  void behind(nb::handle attended, nb::handle x, nb::handle out) const {
    const Tensor seen(attended, "attended", 2), rows(x, "x", 2), result(out, "out", 2);
    const int64_t count = seen.size(0);
    const char *from = out_->checked(seen, count, out_->width()), *added = out_->checked(rows, count, out_->outputs());
    char* to = out_->checked(result, count, out_->outputs());
    nb::gil_scoped_release release;
    static thread_local std::vector<char> sums, wide;
    const int64_t size = size_of(out_->type()), most = std::min(count, kSlabRows);
    char *middle = out_->room(sums, most * out_->outputs()), *gates = out_->room(wide, most * gate_up_->outputs());
    for (int64_t first = 0; first < count; first += kSlabRows) {
      const int64_t some = std::min(count - first, kSlabRows), at = first * out_->outputs() * size;
      out_->compute(from + first * out_->width() * size, some, added + at, middle);
      gate_up_->compute(middle, some, nullptr, gates);
      down_->compute(gates, some, middle, to + at);
    }
  }

 private:
  // Rows of a prompt whose gates lie in memory that is kept: new pages cost as much time as the products.
  static constexpr int64_t kSlabRows = 512;

  std::vector<nb::object> owners_;
  const Projection *qkv_, *out_, *gate_up_, *down_;
  nb::object q_norm_, k_norm_;
  float eps_;
  int64_t heads_, kv_heads_, dim_;
};

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
  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, float, int64_t, int64_t,
                    int64_t>(),
           nb::arg("qkv"), nb::arg("out"), nb::arg("gate_up"), nb::arg("down"), nb::arg("q_norm").none(),
           nb::arg("k_norm").none(), nb::arg("eps"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("dim"))
      .def("before", &DecoderLayer::before, nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("rows"))
      .def("behind", &DecoderLayer::behind, nb::arg("attended"), nb::arg("x"), nb::arg("out"));
  m.def("rotate_heads", rotate_heads, nb::arg("rows"), nb::arg("cos"), nb::arg("sin"), nb::arg("q_norm").none(),
        nb::arg("k_norm").none(), nb::arg("eps"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("dim"));
  m.def("gate_rows", gate_rows, nb::arg("x"), nb::arg("out"));
}

}  // namespace kvreclaim
