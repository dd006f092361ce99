// Batch (one per step), paged_attention and column_sums.
#include <vector>

#include "bind.h"
#include "kvreclaim/batch.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

// The sequences of a step; the arrays they point into are kept alive.
struct Batch {
  std::vector<SequenceView> sequences;
  std::vector<nb::object> owners;
  int64_t num_rows = 0;
  int64_t block_size;
  int64_t max_block = -1;

  explicit Batch(int64_t block_size) : block_size(block_size) {}
};

using BlockIds = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

SlotPositions positions_of(nb::handle object) {
  if (object.is_none()) return {nullptr, 0, 0, 0};
  const Tensor table(object, "slot_positions", 3);
  table.require(table.element() == Element::kI32, "has another dtype than the kernel takes");
  table.require(table.size(2) <= 1 || table.stride(2) == 1, "is not contiguous in its slots");
  return {reinterpret_cast<const int32_t*>(table.bytes()), table.stride(0), table.stride(1), table.size(2)};
}

void add(Batch& self, nb::object block_ids, int64_t query_len, int64_t seq_len, int64_t shift,
         nb::object slot_positions) {
  const auto ids = nb::cast<BlockIds>(block_ids);
  if (query_len < 0 || query_len > seq_len) throw nb::value_error("query_len is negative or above seq_len");
  if ((int64_t)ids.size() * self.block_size < seq_len)
    throw nb::value_error("block_ids has too few blocks for seq_len");
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids.data()[i] < 0) throw nb::value_error("block_ids has a negative block");
    if (ids.data()[i] > self.max_block) self.max_block = ids.data()[i];
  }
  self.sequences.push_back({ids.data(), self.num_rows, query_len, seq_len, shift, positions_of(slot_positions)});
  self.num_rows += query_len;
  self.owners.push_back(std::move(block_ids));
  self.owners.push_back(std::move(slot_positions));
}

// Sequences without slot_positions out of int32 tensors: block_table [N, W], query_starts [N + 1], seq_lens and
// shifts [N].
Batch from_arrays(int64_t block_size, nb::object block_table, nb::handle query_starts, nb::handle seq_lens,
                  nb::handle shifts) {
  const Tensor table(block_table, "block_table", 2), starts(query_starts, "query_starts", 1),
      lengths(seq_lens, "seq_lens", 1), moved(shifts, "shifts", 1);
  const int64_t count = table.size(0);
  starts.require_shape({count + 1});
  lengths.require_shape({count});
  moved.require_shape({count});
  const BatchArrays arrays{table.data<int32_t>(Element::kI32), starts.data<int32_t>(Element::kI32),
                           lengths.data<int32_t>(Element::kI32), moved.data<int32_t>(Element::kI32),
                           count, table.size(1)};
  Batch batch(block_size);
  const char* problem = append_sequences(arrays, block_size, batch.sequences, batch.max_block);
  if (problem != nullptr) throw nb::value_error(problem);
  batch.num_rows = arrays.query_starts[count];
  batch.owners.push_back(std::move(block_table));
  return batch;
}

// What the softmax of a step depends on, checked; `sinks` and `queries` have to outlive it.
AttentionArgs softmax_args(const Tensor& queries, const Cache& cache, int64_t layer, const Batch& batch, float scale,
                           float softcap, int64_t window, nb::handle sinks) {
  const CacheView& view = cache.view;
  const int64_t rows = queries.size(0), heads = queries.size(1);
  queries.require_shape({-1, -1, head_dim(view)});
  queries.require(batch.num_rows <= rows, "has fewer rows than the batch");
  queries.require(heads % view.heads == 0, "has a number of heads that is no multiple of the KV heads");
  if (layer < 0 || layer >= view.layers) throw nb::index_error("layer is outside the cache");
  if (batch.max_block >= view.blocks) throw nb::index_error("the batch names a block outside the cache");
  if (batch.block_size != view.block_size) throw nb::value_error("the batch has another block size");
  const float* sink_data = nullptr;
  int64_t num_sinks = heads;
  if (!sinks.is_none()) {
    const Tensor tensor(sinks, "sinks", 1);
    num_sinks = tensor.size(0);
    tensor.require(num_sinks > 0 && num_sinks % heads == 0, "has a length that is no multiple of the heads");
    sink_data = tensor.data<float>(Element::kF32);
  }
  return {view,  layer, rows_view(queries),     RowsView{},
          rows,  heads, batch.sequences.data(), (int64_t)batch.sequences.size(),
          scale, softcap, window, sink_data, num_sinks};
}

void attend(nb::handle q, nb::handle out, const Cache& cache, int64_t layer, const Batch& batch, float scale,
            float softcap, int64_t window, nb::handle sinks) {
  const Tensor queries(q, "q", 3), result(out, "out", 3);
  AttentionArgs args = softmax_args(queries, cache, layer, batch, scale, softcap, window, sinks);
  result.require_shape({args.num_rows, args.num_heads, cache.view.v_dim});
  result.require(result.is_contiguous(), "is not contiguous");
  args.out = rows_view(result);
  nb::gil_scoped_release release;
  kernels().paged_attention(args);
}

void sum_columns(nb::handle q, nb::handle sums, const Cache& cache, int64_t layer, const Batch& batch, float scale,
                 float softcap, int64_t window, nb::handle sinks) {
  const Tensor queries(q, "q", 3), result(sums, "sums", 3);
  const AttentionArgs args = softmax_args(queries, cache, layer, batch, scale, softcap, window, sinks);
  result.require_shape({args.num_sequences, cache.view.heads, -1});
  for (const SequenceView& seq : batch.sequences)
    result.require(seq.seq_len <= result.size(2), "has fewer columns than a sequence has slots");
  const ColumnSumsArgs all{args, result.data<float>(Element::kF32), result.size(2)};
  nb::gil_scoped_release release;
  kernels().column_sums(all);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.attr("exact_queries") = kExactQueries;
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<int64_t>(), nb::arg("block_size"))
      .def("add", add, nb::arg("block_ids"), nb::arg("query_len"), nb::arg("seq_len"), nb::arg("shift"),
           nb::arg("slot_positions").none())
      .def_static("from_arrays", from_arrays, nb::arg("block_size"), nb::arg("block_table"), nb::arg("query_starts"),
                  nb::arg("seq_lens"), nb::arg("shifts"));
  m.def("paged_attention", attend, nb::arg("q"), nb::arg("out"), nb::arg("cache"), nb::arg("layer"),
        nb::arg("batch"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"), nb::arg("sinks").none());
  m.def("column_sums", sum_columns, nb::arg("q"), nb::arg("sums"), nb::arg("cache"), nb::arg("layer"),
        nb::arg("batch"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"), nb::arg("sinks").none());
}

}  // namespace kvreclaim
