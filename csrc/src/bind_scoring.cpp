// trig_norm_scores, mixture_scores, surrogate_scores, token_norms, select_top.
#include "bind.h"
#include "kvreclaim/table.h"

namespace kvreclaim {

namespace {

TokensView tokens_view(const Cache& cache, int64_t layer, const Tensor& block_ids, int64_t num_tokens) {
  const CacheView& view = cache.view;
  if (layer < 0 || layer >= view.layers) throw nb::index_error("layer is outside the cache");
  if (num_tokens < 1) throw nb::value_error("num_tokens is below 1");
  block_ids.require(num_tokens <= block_ids.size(0) * view.block_size, "has too few blocks for these tokens");
  const int64_t* ids = block_ids.data<int64_t>(Element::kI64);
  for (int64_t i = 0; i < block_ids.size(0); ++i)
    block_ids.require(ids[i] >= 0 && ids[i] < view.blocks, "names a block outside the cache");
  return {view, layer, ids, num_tokens};
}

void check_heads(const Tensor& tensor, const Cache& cache) {
  tensor.require(tensor.size(0) > 0 && tensor.size(0) % cache.view.heads == 0,
                 "has a number of heads that is no multiple of the KV heads");
}

void trig(const Cache& cache, int64_t layer, nb::handle block_ids, int64_t num_tokens, nb::handle queries,
          nb::handle weights, int64_t start, int64_t bands, bool interleaved, nb::handle out) {
  const Tensor ids(block_ids, "block_ids", 1), rows(queries, "queries", 3), result(out, "out", 2);
  const TokensView tokens = tokens_view(cache, layer, ids, num_tokens);
  check_heads(rows, cache);
  rows.require_shape({-1, -1, head_dim(cache.view)});
  result.require_shape({rows.size(0), num_tokens});
  if (start < 0 || bands < 0 || start + 2 * bands > head_dim(cache.view))
    throw nb::value_error("the rotated dims do not fit the head dim");
  const float* weight_data = nullptr;
  if (!weights.is_none()) {
    const Tensor tensor(weights, "weights", 2);
    tensor.require_shape({rows.size(0), bands});
    weight_data = tensor.data<float>(Element::kF32);
  }
  const TrigArgs args{tokens,      rows.data<float>(Element::kF32),
                      weight_data, rows.size(0),
                      rows.size(1), start,
                      bands,       interleaved,
                      result.data<float>(Element::kF32)};
  nb::gil_scoped_release release;
  kernels().trig_norm_scores(args);
}

void mixture(const Cache& cache, int64_t layer, nb::handle block_ids, int64_t num_tokens, nb::handle centers,
             nb::handle variances, float scale, int64_t begin, int64_t end, nb::handle out) {
  const Tensor ids(block_ids, "block_ids", 1), mu(centers, "centers", 4), var(variances, "variances", 3);
  const Tensor result(out, "out", 2);
  const TokensView tokens = tokens_view(cache, layer, ids, num_tokens);
  check_heads(mu, cache);
  mu.require_shape({-1, -1, -1, head_dim(cache.view)});
  var.require_shape({mu.size(0), mu.size(1), head_dim(cache.view)});
  result.require_shape({cache.view.heads, num_tokens});
  if (begin < 0 || end > num_tokens) throw nb::value_error("the competing tokens lie outside the sequence");
  const MixtureArgs args{tokens,     mu.data<float>(Element::kF32),
                         var.data<float>(Element::kF32),
                         mu.size(0), mu.size(1),
                         mu.size(2), scale,
                         begin,      end,
                         result.data<float>(Element::kF32)};
  nb::gil_scoped_release release;
  kernels().mixture_scores(args);
}

void norms(const Cache& cache, int64_t layer, nb::handle block_ids, int64_t num_tokens, bool values,
           nb::handle out) {
  const Tensor ids(block_ids, "block_ids", 1), result(out, "out", 2);
  const TokensView tokens = tokens_view(cache, layer, ids, num_tokens);
  result.require_shape({cache.view.heads, num_tokens});
  const NormArgs args{tokens, values, result.data<float>(Element::kF32)};
  nb::gil_scoped_release release;
  kernels().token_norms(args);
}

void surrogate(const Cache& cache, int64_t layer, nb::handle block_ids, int64_t num_tokens, nb::handle weights,
               nb::handle owners, int64_t start, int64_t bands, bool interleaved, nb::handle out) {
  const Tensor ids(block_ids, "block_ids", 1), rows(weights, "weights", 2), result(out, "out", 2);
  const TokensView tokens = tokens_view(cache, layer, ids, num_tokens);
  if (start < 0 || bands < 0 || start + 2 * bands > head_dim(cache.view))
    throw nb::value_error("the rotated dims do not fit the head dim");
  rows.require_shape({-1, surrogate_width(cache.view, bands)});
  result.require_shape({cache.view.heads, num_tokens});
  const int64_t* owner_data = nullptr;
  if (owners.is_none()) {
    rows.require(rows.size(0) == cache.view.heads, "must have a row for each KV head");
  } else {
    const Tensor tensor(owners, "owners", 1);
    tensor.require_shape({ids.size(0)});
    owner_data = tensor.data<int64_t>(Element::kI64);
    for (int64_t i = 0; i < ids.size(0); ++i)
      tensor.require(owner_data[i] >= 0 && owner_data[i] < rows.size(0), "names a row outside the weights");
  }
  const SurrogateArgs args{tokens, rows.data<float>(Element::kF32), owner_data, start, bands, interleaved,
                           result.data<float>(Element::kF32)};
  nb::gil_scoped_release release;
  kernels().surrogate_scores(args);
}

bool select(nb::handle scores, nb::handle out) {
  const Tensor rows(scores, "scores", 2), result(out, "out", 2);
  result.require_shape({rows.size(0), -1});
  result.require(result.size(1) <= rows.size(1), "has more places than scores has columns");
  bool nan = false;
  const SelectArgs args{rows.data<float>(Element::kF32),         rows.size(0), rows.size(1), result.size(1),
                        result.data<int64_t>(Element::kI64), &nan};
  nb::gil_scoped_release release;
  kernels().select_top(args);
  return nan;
}

}  // namespace

void bind_scoring(nb::module_& m) {
  m.def("trig_norm_scores", trig, nb::arg("cache"), nb::arg("layer"), nb::arg("block_ids"), nb::arg("num_tokens"),
        nb::arg("queries"), nb::arg("weights").none(), nb::arg("start"), nb::arg("bands"), nb::arg("interleaved"),
        nb::arg("out"));
  m.def("mixture_scores", mixture);
  m.def("surrogate_scores", surrogate, nb::arg("cache"), nb::arg("layer"), nb::arg("block_ids"), nb::arg("num_tokens"),
        nb::arg("weights"), nb::arg("owners").none(), nb::arg("start"), nb::arg("bands"), nb::arg("interleaved"),
        nb::arg("out"));
  m.def("token_norms", norms);
  m.def("select_top", select);
}

}  // namespace kvreclaim
