// compact.
#include "bind.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

bool is_table(const Tensor& ids, int64_t blocks) {
  const int64_t* data = ids.data<int64_t>(Element::kI64);
  bool inside = true;
  for (int64_t i = 0; i < ids.size(0); ++i) inside &= data[i] >= 0 && data[i] < blocks;
  return inside;
}

// Strictly ascending slots in [0, slots), row by row.
bool is_ascending(const int64_t* row, int64_t count, int64_t slots) {
  bool ascending = row[0] >= 0 && row[count - 1] < slots;
  for (int64_t i = 1; i < count; ++i) ascending &= row[i - 1] < row[i];
  return ascending;
}

void move(const Cache& cache, nb::handle kept, nb::handle source_ids, nb::handle target_ids) {
  const CacheView& view = cache.view;
  const Tensor slots(kept, "kept", 3), sources(source_ids, "source_ids", 1), targets(target_ids, "target_ids", 1);
  slots.require(slots.size(0) == 1 || slots.size(0) == view.layers, "has neither one layer nor all");
  slots.require(slots.size(1) == 1 || slots.size(1) == view.heads, "has neither one KV head nor all");
  const int64_t* data = slots.data<int64_t>(Element::kI64);
  const int64_t rows = slots.size(0) * slots.size(1), count = slots.size(2);
  for (int64_t row = 0; count > 0 && row < rows; ++row)
    slots.require(is_ascending(data + row * count, count, sources.size(0) * view.block_size),
                  "does not ascend within the old table");
  sources.require(is_table(sources, view.blocks), "names a block outside the cache");
  targets.require(is_table(targets, view.blocks), "names a block outside the cache");
  targets.require(count <= targets.size(0) * view.block_size, "has too few blocks for the kept slots");
  const CompactArgs args{view,  data, slots.size(0), slots.size(1),
                         count, sources.data<int64_t>(Element::kI64), sources.size(0),
                         targets.data<int64_t>(Element::kI64)};
  nb::gil_scoped_release release;
  kernels().compact(args);
}

}  // namespace

void bind_compact(nb::module_& m) { m.def("compact", move); }

}  // namespace kvreclaim
