// Packed: a matrix of 2 to 8 bits a weight; packed_linear, unpack_rows.
#include <cmath>
#include <cstring>

#include "bind.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

bool has_kind(Codes codes, Grid grid) {
  switch (codes) {
    case Codes::kNibble: return grid != Grid::kSigned;
    case Codes::kTwo: return grid == Grid::kSuper;
    case Codes::kThree:
    case Codes::kSix: return grid == Grid::kSigned;
    case Codes::kFive: return grid == Grid::kScale || grid == Grid::kMin || grid == Grid::kSuper;
    default: return grid == Grid::kScale;
  }
}

float largest_of(const float* values) {
  float largest = 1e-30f;
  for (int i = 0; i < 16; ++i) largest = std::fmax(largest, std::fabs(values[i]));
  return largest;
}

// The unit, of those in which all values are at most 127, that loses least (in squares) by rounding to multiples.
float best_unit(const float* values) {
  const float largest = largest_of(values);
  float best = 0;
  double least = -1;
  for (int steps = 127 * 8; steps >= 64 * 8; --steps) {
    const float unit = largest * 8.0f / (float)steps;
    double lost = 0;
    for (int i = 0; i < 16; ++i) {
      const double off = values[i] - (double)unit * std::lrint(values[i] / unit);
      lost += off * off;
    }
    if (least < 0 || lost < least) least = lost, best = unit;
  }
  return best;
}

const char* bytes_of(nb::object object, const char* name, int64_t count, Element element) {
  const Tensor tensor(object, name, Tensor::kAnyDims);
  int64_t found = 1;
  for (int i = 0; i < tensor.ndim(); ++i) found *= tensor.size(i);
  tensor.require(found == count, "has another number of elements than the matrix needs");
  return tensor.data<char>(element);
}

}  // namespace

Packed::Packed(int codes, int grid, nb::object data, nb::object scales, nb::object offsets, nb::object supers,
               nb::object table, int64_t out, int64_t in, int64_t group)
    : owners{data, scales, offsets, supers} {
  view = {(Codes)codes, (Grid)grid, false, out, in, group, nullptr, nullptr, nullptr, nullptr, {}, {}, 1.0f, {}, 1.0f};
  const bool is_signed = view.grid == Grid::kSigned, is_super = view.grid == Grid::kSuper || is_signed;
  const bool are_known = codes >= 0 && codes <= (int)Codes::kFive && grid >= 0 && grid <= (int)Grid::kSigned;
  if (!are_known || !has_kind(view.codes, view.grid))
    throw nb::value_error("codes and grid are no kind that the kernels have");
  if (out <= 0 || in <= 0 || in % (is_super ? kSuperCols : kChunkCols) != 0)
    throw nb::value_error("out or in is no size that the kernels take");
  if (!is_super && (group <= 0 || group % kChunkCols != 0 || in % group != 0))
    throw nb::value_error("group is no multiple of 32 that divides in");
  const int64_t blocks = (out + kBlockRows - 1) / kBlockRows, rows = blocks * kBlockRows;
  view.data = bytes_of(data, "data", blocks * (in / kChunkCols) * lines_of(view.codes) * 64, Element::kU8);
  if (is_super) {
    const int64_t each = is_signed ? 1 : 2, groups = in / small_group_of(view.codes, view.grid);
    view.scales = bytes_of(scales, "scales", rows * groups * each, Element::kU8);
    view.supers = bytes_of(supers, "supers", rows * (in / kSuperCols) * each, Element::kF16);
    return;
  }
  const Element element = Tensor(scales, "scales", Tensor::kAnyDims).element();
  view.is_wide = element == Element::kF32;
  const int64_t count = rows * (in / group);
  view.scales = bytes_of(scales, "scales", count, view.is_wide ? element : Element::kF16);
  if (view.grid == Grid::kZero) view.offsets = bytes_of(offsets, "offsets", count, Element::kU8);
  if (view.grid == Grid::kMin) view.offsets = bytes_of(offsets, "offsets", count, element);
  if (view.codes != Codes::kTable) return;
  std::memcpy(view.values, bytes_of(table, "table", 16, Element::kF32), sizeof(view.values));
  view.unit = best_unit(view.values);
  view.fine_unit = largest_of(view.values) / (float)(127 * kHighUnit);
  for (int i = 0; i < 16; ++i) {
    view.table[i] = (int8_t)std::lrint(view.values[i] / view.unit);
    const long steps = std::lrint(view.values[i] / view.fine_unit), high = (steps + 64) >> kLowBits;
    view.fine[0][i] = (int8_t)high, view.fine[1][i] = (int8_t)(steps - high * kHighUnit);
  }
}

PackedGroup::PackedGroup(nb::sequence matrices) {
  for (nb::handle each : matrices) {
    const Packed& packed = nb::cast<const Packed&>(each);
    if (!views.empty() && views[0]->in != packed.view.in)
      throw nb::value_error("matrices take rows of different sizes");
    owners.push_back(nb::borrow(each));
    views.push_back(&packed.view);
    out += packed.view.out;
  }
  if (views.empty()) throw nb::value_error("matrices is empty");
  in = views[0]->in;
}

Activations activations_of(int kind) {
  if (kind < 0 || kind > (int)Activations::kExact) throw nb::value_error("activations is no kind that the kernels have");
  return (Activations)kind;
}

namespace {

void packed_linear(nb::sequence matrices, nb::handle x, nb::handle bias, nb::handle out, int activations) {
  const PackedGroup group(matrices);
  const Tensor rows(x, "x", 2), result(out, "out", 2);
  rows.require_shape({-1, group.in});
  rows.require(rows.is_contiguous(), "is not contiguous");
  result.require_shape({rows.size(0), group.out});
  result.require(result.is_contiguous() && result.type() == rows.type(), "is not contiguous in x's dtype");
  const char* added = nullptr;
  if (!bias.is_none()) {
    const Tensor vector(bias, "bias", 1);
    vector.require_shape({group.out});
    added = vector.data<char>(rows.element());
  }
  const PackedArgs args{rows.bytes(),   group.views.data(), (int64_t)group.views.size(), added, result.bytes(),
                        rows.size(0), group.out,          rows.type(),                 activations_of(activations)};
  nb::gil_scoped_release release;
  kernels().packed_linear(args);
}

void unpack_rows(const Packed& matrix, nb::handle ids, nb::handle out) {
  const Tensor rows(ids, "ids", 1), result(out, "out", 2);
  const int64_t* at = rows.data<int64_t>(Element::kI64);
  result.require_shape({rows.size(0), matrix.view.in});
  result.require(result.is_contiguous(), "is not contiguous");
  for (int64_t i = 0; i < rows.size(0); ++i)
    if (at[i] < 0 || at[i] >= matrix.view.out) throw nb::index_error("ids has a row that the matrix lacks");
  const UnpackArgs args{&matrix.view, at, result.bytes(), rows.size(0), result.type()};
  nb::gil_scoped_release release;
  kernels().unpack_rows(args);
}

}  // namespace

void bind_packed(nb::module_& m) {
  nb::class_<Packed>(m, "Packed")
      .def(nb::init<int, int, nb::object, nb::object, nb::object, nb::object, nb::object, int64_t, int64_t, int64_t>(),
           nb::arg("codes"), nb::arg("grid"), nb::arg("data"), nb::arg("scales"), nb::arg("offsets").none(),
           nb::arg("supers").none(), nb::arg("table").none(), nb::arg("out"), nb::arg("in"), nb::arg("group"))
      .def_prop_ro("unit", [](const Packed& packed) { return packed.view.unit; })
      .def_prop_ro("fine_unit", [](const Packed& packed) { return packed.view.fine_unit; });
  m.def("packed_linear", packed_linear, nb::arg("matrices"), nb::arg("x"), nb::arg("bias").none(), nb::arg("out"),
        nb::arg("activations"));
  m.def("unpack_rows", unpack_rows, nb::arg("matrix"), nb::arg("ids"), nb::arg("out"));
}

}  // namespace kvreclaim
