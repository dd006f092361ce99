// Paged attention: decode and chunked prefill by one kernel, in tiles with an online softmax.
//
// A work item is (sequence, KV heads, block of query rows, part of the keys), see plan.h. A row's result depends
// neither on the batch nor on the threads; the sums of the parts of its keys are merged at the end.
// Source of the merge: online softmax, arXiv 1805.02867; split keys as in Flash-Decoding.
#pragma once

#include "kvreclaim/attention_args.h"

#ifdef KVR_NS
#include <cstdlib>

#include "kvreclaim/plan.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

// Merges the parts of one KV head's rows into part 0 and writes them out.
inline void merge_head(const AttentionArgs& a, const Plan& plan, int64_t head, float* partials) {
  const int64_t rows = plan.rows, width = a.cache.v_dim + 2;
  for (int64_t r = 0; r < rows; ++r) {
    float* first = partials + (plan.partials + head * rows + r) * width;
    const int64_t step = a.cache.heads * rows * width;
    Sums sums{first[0], first[1], first + 2};
    for (int64_t s = 1; s < plan.parts; ++s) {
      const float* other = first + s * step;
      merge(sums, {other[0], other[1], const_cast<float*>(other + 2)}, a.cache.v_dim);
    }
    write_row(a, row_map(plan.seq, head, group_size(a)), r, sums);
  }
}

// out[t, h] for every row of every sequence; rows that belong to no sequence become zero. Defined once per
// instruction set, by src/attention.cpp.
void paged_attention(const AttentionArgs& a) {
  const int64_t heads = a.cache.heads;
  Plans all = plan_batch(a);
  const Plan* plans = all.plans;
  float* partials = call_scratch(all.partial_rows * (a.cache.v_dim + 2));
  parallel_for(all.items, [&](int64_t index) {
    int64_t low = 0, high = all.count;  // plans[low].first_item <= index < plans[high].first_item
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (plans[middle].first_item <= index ? low : high) = middle;
    }
    const Plan& plan = plans[low];
    const Place place = place_of(a, plan, index - plan.first_item);
    const Item item = item_of(a, plan, place);
    const int64_t own = plan.partials + (place.part * heads + item.head) * plan.rows + item.row;
    run_item(a, item, plan.run, plan.is_decode, plan.is_cut() ? partials + own * (a.cache.v_dim + 2) : nullptr);
  });
  if (all.partial_rows > 0)
    parallel_for(all.count * heads, [&](int64_t i) {
      const Plan& plan = plans[i / heads];
      if (plan.is_cut()) merge_head(a, plan, i % heads, partials);
    });
  for (int64_t t = all.query_rows; t < a.num_rows; ++t) zero_row(a.out, t, a.num_heads, a.cache.v_dim);
  std::free(all.plans);
}

}  // namespace kvreclaim::KVR_NS
#endif
