// The weights of recurrent layers, checked once, and their calls.
#include <nanobind/stl/array.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "bind.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

const float* floats_of(nb::handle object, const char* name, int64_t size) {
  const Tensor vector(object, name, 1);
  vector.require_shape({size});
  return vector.data<float>(Element::kF32);
}

const char* weights_of(nb::handle object, const char* name, std::initializer_list<int64_t> shape, Element element) {
  if (object.is_none()) return nullptr;
  const Tensor tensor(object, name, (int)shape.size());
  tensor.require_shape(shape);
  return tensor.data<char>(element);
}

// The convolution: weight [channels, width], bias [channels] or None, pieces int64 [P, 3].
struct Convolution {
  Convolution(nb::handle weight, nb::handle bias, nb::handle pieces) : view{} {
    const Tensor w(weight, "conv_weight", 2), p(pieces, "pieces", 2);
    type = w.type(), element = w.element();
    view.channels = w.size(0), view.width = w.size(1);
    w.require(view.width > 0 && view.width <= kMostWidth, "has a width that the kernel does not take");
    view.weight = w.data<char>(element);
    view.bias = weights_of(bias, "conv_bias", {view.channels}, element);
    p.require_shape({-1, 3});
    view.pieces = p.data<int64_t>(Element::kI64);
    view.num_pieces = p.size(0);
    for (int64_t i = 0; i < view.num_pieces; ++i) {
      const int64_t* piece = view.pieces + 3 * i;
      p.require(piece[0] >= 0 && piece[1] >= 0 && piece[2] >= 0 && piece[1] + piece[2] <= view.channels,
                "lie outside of the convolution");
      row_size = std::max(row_size, piece[0] + piece[2]);
    }
  }

  ConvStep view;
  Type type;
  Element element;
  int64_t row_size = 0;  // numbers that a row needs
};

// Fills step from a call's tensors; `slots` are there.
void fill(StepRows& step, const Tensor& x, int64_t row_size, int64_t out_size, int64_t slots, nb::handle starts,
          nb::handle read, nb::handle write, nb::handle out) {
  const Tensor begins(starts, "starts", 1), from(read, "read", 1), to(write, "write", 1), result(out, "out", 2);
  x.require(x.size(1) >= row_size && (x.size(1) <= 1 || x.stride(1) == 1), "has rows that are too short or not dense");
  const int64_t tokens = x.size(0), count = from.size(0);
  begins.require_shape({count + 1});
  to.require_shape({tokens});
  result.require_shape({tokens, out_size});
  step = {x.bytes(), result.data<char>(x.element()), begins.data<int64_t>(Element::kI64),
          from.data<int64_t>(Element::kI64), to.data<int64_t>(Element::kI64), count, tokens, x.stride(0), x.type(),
          count == tokens};
  begins.require(step.starts[0] == 0 && step.starts[count] == tokens, "do not hold all rows");
  for (int64_t n = 0; n < count; ++n) {
    begins.require(step.starts[n] < step.starts[n + 1] && step.starts[n + 1] <= tokens, "do not ascend");
    from.require(step.read[n] >= -1 && step.read[n] < slots, "names a slot that is not there");
    to.require(step.write[step.starts[n + 1] - 1] >= 0, "names no slot behind a sequence's last token");
    step.decode = step.decode && step.read[n] >= 0;
  }
  for (int64_t t = 0; t < tokens; ++t)
    to.require(step.write[t] >= -1 && step.write[t] < slots, "names a slot that is not there");
}

// Fills step and conv from a call's tensors. Returns the number of slots.
int64_t fill(StepRows& step, ConvStep& conv, const Convolution& own, int64_t row_size, int64_t out_size,
             nb::handle rows, nb::handle starts, nb::handle read, nb::handle write, nb::handle conv_states,
             nb::handle out) {
  const Tensor x(rows, "rows", 2), held(conv_states, "conv_states", 3);
  x.require(x.element() == own.element, "has another dtype than conv_weight");
  held.require_shape({-1, own.view.channels, -1});
  held.require(held.size(2) >= own.view.width - 1 && held.size(2) > 0, "keeps too few inputs");
  fill(step, x, row_size, out_size, held.size(0), starts, read, write, out);
  conv = own.view;
  conv.states = held.data<char>(own.element);
  conv.kept = held.size(2);
  return held.size(0);
}

// What the layers share: their weights, checked once, and a call.
template <class Args>
class Layer {
 public:
  void run(nb::handle rows, nb::handle starts, nb::handle read, nb::handle write, nb::handle conv_states,
           nb::handle states, nb::handle out) const {
    Args args = args_;
    const int64_t slots =
        fill(args.step, args.conv, conv_, row_size_, out_size_, rows, starts, read, write, conv_states, out);
    const Tensor all(states, "states", 4);
    all.require_shape({slots, state_[0], state_[1], state_[2]});
    args.states = all.template data<float>(Element::kF32);
    nb::gil_scoped_release release;
    (kernels().*kernel_)(args);
  }

 protected:
  using Kernel = void (*KernelTable::*)(const Args&);

  Layer(Kernel kernel, std::vector<nb::object> owners)
      : owners_(std::move(owners)), conv_(owners_[0], owners_[1], owners_[2]), args_{}, kernel_(kernel),
        row_size_(conv_.row_size) {}

  void set_sizes(int64_t out_size, std::array<int64_t, 3> state, int64_t channels) {
    if (conv_.view.channels != channels) throw nb::value_error("the convolution has another number of channels");
    out_size_ = out_size, state_ = state;
  }

  std::vector<nb::object> owners_;
  Convolution conv_;
  Args args_;
  Kernel kernel_;
  int64_t row_size_, out_size_ = 0;
  std::array<int64_t, 3> state_{};  // sizes of a slot
};

class DeltaStep : public Layer<DeltaStepArgs> {
 public:
  // sizes: heads, k_heads, k_dim, v_dim. places: int64 [3, heads].
  DeltaStep(nb::object conv_weight, nb::object conv_bias, nb::object pieces, std::array<int64_t, 4> sizes,
            nb::object places, nb::object decay, nb::object dt_bias, nb::object norm, float eps)
      : Layer(&KernelTable::delta_step, {conv_weight, conv_bias, pieces, places, decay, dt_bias, norm}) {
    if (sizes[1] < 1 || sizes[0] % sizes[1]) throw nb::value_error("sizes do not fit");
    args_.heads = sizes[0], args_.k_heads = sizes[1], args_.k_dim = sizes[2], args_.v_dim = sizes[3];
    const int64_t inner = args_.heads * args_.v_dim;
    set_sizes(inner, {args_.heads, args_.k_dim, args_.v_dim}, 2 * args_.k_heads * args_.k_dim + inner);
    const Tensor at(places, "places", 2);
    at.require_shape({3, args_.heads});
    args_.places = at.data<int64_t>(Element::kI64);
    for (int64_t i = 0; i < 3 * args_.heads; ++i) {
      at.require(args_.places[i] >= 0, "are negative");
      row_size_ = std::max(row_size_, args_.places[i] + (i < args_.heads ? args_.v_dim : 1));
    }
    args_.decay = floats_of(decay, "decay", args_.heads);
    args_.dt_bias = floats_of(dt_bias, "dt_bias", args_.heads);
    args_.norm = weights_of(norm, "norm", {args_.v_dim}, conv_.element);
    if (args_.norm == nullptr) throw nb::value_error("norm is None");
    args_.eps = eps;
  }
};

class SsdStep : public Layer<SsdStepArgs> {
 public:
  // sizes: heads, dim, groups, size, norm_groups, place of z, place of dt.
  SsdStep(nb::object conv_weight, nb::object conv_bias, nb::object pieces, std::array<int64_t, 7> sizes, nb::object a,
          nb::object d, nb::object dt_bias, nb::object norm, float eps, bool norm_before_gate,
          std::array<float, 2> dt_limits)
      : Layer(&KernelTable::ssd_step, {conv_weight, conv_bias, pieces, a, d, dt_bias, norm}) {
    if (sizes[2] < 1 || sizes[4] < 1 || sizes[0] % sizes[2] || sizes[0] * sizes[1] % sizes[4] ||
        sizes[5] < 0 || sizes[6] < 0)
      throw nb::value_error("sizes do not fit");
    args_.heads = sizes[0], args_.dim = sizes[1], args_.groups = sizes[2], args_.size = sizes[3];
    args_.norm_groups = sizes[4], args_.z_place = sizes[5], args_.dt_place = sizes[6];
    const int64_t inner = args_.heads * args_.dim;
    set_sizes(inner, {args_.heads, args_.dim, args_.size}, inner + 2 * args_.groups * args_.size);
    row_size_ = std::max({row_size_, args_.z_place + inner, args_.dt_place + args_.heads});
    args_.a = floats_of(a, "a", args_.heads);
    args_.d = floats_of(d, "d", args_.heads);
    args_.dt_bias = floats_of(dt_bias, "dt_bias", args_.heads);
    args_.norm = weights_of(norm, "norm", {inner}, conv_.element);
    args_.eps = eps;
    args_.norm_before_gate = norm_before_gate;
    args_.dt_least = dt_limits[0], args_.dt_most = dt_limits[1];
  }
};

class ShortConvStep {
 public:
  // places: of B, C and x in a row.
  ShortConvStep(nb::object conv_weight, nb::object conv_bias, nb::object pieces, std::array<int64_t, 3> places)
      : owners_{conv_weight, conv_bias, pieces}, conv_(conv_weight, conv_bias, pieces), places_(places) {
    for (const int64_t place : places) {
      if (place < 0) throw nb::value_error("a place is negative");
      row_size_ = std::max(row_size_, place + conv_.view.channels);
    }
  }

  void run(nb::handle rows, nb::handle starts, nb::handle read, nb::handle write, nb::handle conv_states,
           nb::handle out) const {
    ShortConvArgs args{{}, {}, places_[0], places_[1], places_[2]};
    fill(args.step, args.conv, conv_, row_size_, conv_.view.channels, rows, starts, read, write, conv_states, out);
    nb::gil_scoped_release release;
    kernels().short_conv_step(args);
  }

 private:
  std::vector<nb::object> owners_;
  Convolution conv_;
  std::array<int64_t, 3> places_;
  int64_t row_size_ = 0;
};

class SiluConvStep {
 public:
  SiluConvStep(nb::object conv_weight, nb::object conv_bias, nb::object pieces)
      : owners_{conv_weight, conv_bias, pieces}, conv_(conv_weight, conv_bias, pieces) {}

  void run(nb::handle rows, nb::handle starts, nb::handle read, nb::handle write, nb::handle conv_states,
           nb::handle out) const {
    SiluConvArgs args{};
    fill(args.step, args.conv, conv_, conv_.row_size, conv_.view.channels, rows, starts, read, write, conv_states, out);
    nb::gil_scoped_release release;
    kernels().silu_conv_step(args);
  }

 private:
  std::vector<nb::object> owners_;
  Convolution conv_;
};

class SelectiveScan {
 public:
  SelectiveScan(nb::object a, nb::object d, nb::object b_norm, nb::object c_norm, float eps)
      : owners_{a, d, b_norm, c_norm}, args_{} {
    const Tensor decays(a, "a", 2);
    args_.a = decays.data<float>(Element::kF32);
    args_.size = decays.size(0), args_.channels = decays.size(1);
    args_.d = floats_of(d, "d", args_.channels);
    if (b_norm.is_none() != c_norm.is_none()) throw nb::value_error("one of b_norm and c_norm is None");
    if (!b_norm.is_none()) {
      norm_ = Tensor(b_norm, "b_norm", 1).element();
      args_.b_norm = weights_of(b_norm, "b_norm", {args_.size}, norm_);
      args_.c_norm = weights_of(c_norm, "c_norm", {args_.size}, norm_);
    }
    args_.eps = eps;
  }

  void run(nb::handle x, nb::handle dt, nb::handle z, nb::handle bc, nb::handle starts, nb::handle read,
           nb::handle write, nb::handle states, nb::handle out) const {
    SelectiveScanArgs args = args_;
    const Tensor rows(x, "x", 2), all(states, "states", 3);
    rows.require(args.b_norm == nullptr || rows.element() == norm_, "has another dtype than b_norm");
    all.require_shape({-1, args.channels, args.size});
    args.states = all.data<float>(Element::kF32);
    fill(args.step, rows, args.channels, args.channels, all.size(0), starts, read, write, out);
    const auto beside = [&](nb::handle object, const char* name, int64_t size, int64_t& stride) -> const char* {
      const Tensor tensor(object, name, 2);
      tensor.require(tensor.element() == rows.element(), "has another dtype than x");
      tensor.require_shape({rows.size(0), size});
      tensor.require(size <= 1 || tensor.stride(1) == 1, "has rows that are not dense");
      stride = tensor.stride(0);
      return tensor.bytes();
    };
    args.dt = beside(dt, "dt", args.channels, args.dt_stride);
    args.z = beside(z, "z", args.channels, args.z_stride);
    args.bc = beside(bc, "bc", 2 * args.size, args.bc_stride);
    nb::gil_scoped_release release;
    kernels().selective_scan(args);
  }

 private:
  std::vector<nb::object> owners_;
  SelectiveScanArgs args_;
  Element norm_ = Element::kF32;
};

}  // namespace

void bind_recurrent(nb::module_& m) {
  nb::class_<DeltaStep>(m, "DeltaStep")
      .def(nb::init<nb::object, nb::object, nb::object, std::array<int64_t, 4>, nb::object, nb::object, nb::object,
                    nb::object, float>(),
           nb::arg("conv_weight"), nb::arg("conv_bias").none(), nb::arg("pieces"), nb::arg("sizes"), nb::arg("places"),
           nb::arg("decay"), nb::arg("dt_bias"), nb::arg("norm"), nb::arg("eps"))
      .def("run", &DeltaStep::run, nb::arg("rows"), nb::arg("starts"), nb::arg("read"), nb::arg("write"), nb::arg("conv_states"),
           nb::arg("states"), nb::arg("out"));
  nb::class_<SsdStep>(m, "SsdStep")
      .def(nb::init<nb::object, nb::object, nb::object, std::array<int64_t, 7>, nb::object, nb::object, nb::object,
                    nb::object, float, bool, std::array<float, 2>>(),
           nb::arg("conv_weight"), nb::arg("conv_bias").none(), nb::arg("pieces"), nb::arg("sizes"), nb::arg("a"),
           nb::arg("d"), nb::arg("dt_bias"), nb::arg("norm").none(), nb::arg("eps"), nb::arg("norm_before_gate"),
           nb::arg("dt_limits"))
      .def("run", &SsdStep::run, nb::arg("rows"), nb::arg("starts"), nb::arg("read"), nb::arg("write"), nb::arg("conv_states"),
           nb::arg("states"), nb::arg("out"));
  nb::class_<ShortConvStep>(m, "ShortConvStep")
      .def(nb::init<nb::object, nb::object, nb::object, std::array<int64_t, 3>>(), nb::arg("conv_weight"),
           nb::arg("conv_bias").none(), nb::arg("pieces"), nb::arg("places"))
      .def("run", &ShortConvStep::run, nb::arg("rows"), nb::arg("starts"), nb::arg("read"), nb::arg("write"), nb::arg("conv_states"),
           nb::arg("out"));
  nb::class_<SiluConvStep>(m, "SiluConvStep")
      .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("conv_weight"), nb::arg("conv_bias").none(),
           nb::arg("pieces"))
      .def("run", &SiluConvStep::run, nb::arg("rows"), nb::arg("starts"), nb::arg("read"), nb::arg("write"), nb::arg("conv_states"),
           nb::arg("out"));
  nb::class_<SelectiveScan>(m, "SelectiveScan")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, float>(), nb::arg("a"), nb::arg("d"),
           nb::arg("b_norm").none(), nb::arg("c_norm").none(), nb::arg("eps"))
      .def("run", &SelectiveScan::run, nb::arg("x"), nb::arg("dt"), nb::arg("z"), nb::arg("bc"), nb::arg("starts"), nb::arg("read"),
           nb::arg("write"), nb::arg("states"), nb::arg("out"));
}

}  // namespace kvreclaim
