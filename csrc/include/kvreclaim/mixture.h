// Query mixtures: the attention each key expects from the kind of query that wants it most.
//
//   l_{c,o}(j) = s mu_{c,o} . K_j + s^2/2 sum_d v_{c,d} K_{j,d}^2
//   out[k, j]  = max over the KV head's centres c of mean_o softmax_j l_{c,o}(j), j in [begin, end)
//
// One work item takes some centres of a KV head. It walks over the keys in panels that fit the first
// cache: converts a panel to fp32, multiplies it by all offsets of a batch of centres (register blocks of
// kMixRows x kPanelVectors vectors, lanes are tokens) and keeps the logits with their running maxima;
// then one pass turns them into exponentials and their sums, and one more into means and maxima.
// A logit costs D multiply-adds, so where the logits lie matters little; they are kScratch floats or four
// centres' worth, whichever is more. Oracle: ops/scoring.py::mixture_attention.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvreclaim/tokens.h"

namespace kvreclaim {

struct MixtureArgs {
  TokensView tokens;
  const float* centers;    // [H, C, O, D], turned
  const float* variances;  // [H, C, D]
  int64_t query_heads;     // H, a multiple of K
  int64_t count, offsets;  // C, O
  float scale;             // s
  int64_t begin, end;      // the tokens that compete; the others score 0
  float* out;              // [K, T]
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

constexpr int kPanelVectors = kRegisters == 32 ? 4 : 2;
constexpr int kPanel = kPanelVectors * kLanes;  // tokens
constexpr int kMixRows = kRegisters == 32 ? 6 : 4;
constexpr int64_t kMixScratch = 1 << 18;  // floats of logits per thread: 1 MiB
constexpr float kMixMasked = -3e38f;      // logit of a token that does not compete; finite

// Dims whose variances agree in every centre of a KV head (the two of a band do) share one sum of squares.
struct SquareGroups {
  int64_t count;
  int32_t* of;     // [D] -> group
  float* weights;  // [centres, count]: s^2/2 times the variance
};

// Rows of coefficients [rows][dims] times a panel [dims][kPanel].
template <int kRows>
struct PanelProduct {
  vf at[kRows][kPanelVectors];
};

template <int kRows>
KVR_INLINE void multiply_panel(const float* rows, int64_t dims, const float* panel, PanelProduct<kRows>& sum) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) sum.at[r][v] = vf{};
  for (int64_t d = 0; d < dims; ++d, panel += kPanel, ++rows) {
    vf x[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) x[v] = load<vf>(panel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float c = rows[r * dims];
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sum.at[r][v] += c * x[v];
    }
  }
}

// Where a block of logit rows goes, and what joins them.
struct LogitBlock {
  const float* spread;  // [centres of the batch][kPanel]: the variance term
  int64_t first_row;    // row / offsets is its centre
  int64_t offsets;
  float scale;
  const int32_t* masked;  // [kPanel] -1: does not compete; null: all do
  float* logits;          // of this panel; rows are `stride` floats apart
  int64_t stride;
  float* maxima;  // [rows][kLanes]
};

template <int kRows>
__attribute__((noinline)) void mix_logits(const float* rows, int64_t dims, const float* panel,
                                          const LogitBlock& to) {
  PanelProduct<kRows> sum;
  multiply_panel(rows, dims, panel, sum);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const float* spread = to.spread + (to.first_row + r) / to.offsets * kPanel;
    vf top = load<vf>(to.maxima + r * kLanes);
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      vf logit = sum.at[r][v] * to.scale + load<vf>(spread + v * kLanes);
      if (to.masked != nullptr) logit = select(load<vi>(to.masked + v * kLanes), splat(kMixMasked), logit);
      top = vmax(top, logit);
      store(to.logits + r * to.stride + v * kLanes, logit);
    }
    store(to.maxima + r * kLanes, top);
  }
}

template <int kRows>
__attribute__((noinline)) void mix_spread(const float* rows, int64_t dims, const float* panel, float* to) {
  PanelProduct<kRows> sum;
  multiply_panel(rows, dims, panel, sum);
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kPanelVectors; ++v) store(to + r * kPanel + v * kLanes, sum.at[r][v]);
}

// Calls body.run<rows> for `total` rows in blocks of equal size, as far as they go.
template <class Body>
KVR_INLINE void in_row_blocks(int64_t total, const Body& body) {
  for (int64_t row = 0; row < total;) {
    const int64_t left = total - row, rows = ceil_div(left, ceil_div(left, kMixRows));
    body((int)rows, row);
    row += rows;
  }
}

inline void mix_logit_rows(int rows, const float* a, int64_t dims, const float* panel, const LogitBlock& to) {
  switch (rows) {
    case 1: return mix_logits<1>(a, dims, panel, to);
    case 2: return mix_logits<2>(a, dims, panel, to);
    case 3: return mix_logits<3>(a, dims, panel, to);
    case 4: return mix_logits<4>(a, dims, panel, to);
  }
  if constexpr (kMixRows > 4) {
    if (rows == 5) return mix_logits<5>(a, dims, panel, to);
    return mix_logits<6>(a, dims, panel, to);
  }
}

inline void mix_spread_rows(int rows, const float* a, int64_t dims, const float* panel, float* to) {
  switch (rows) {
    case 1: return mix_spread<1>(a, dims, panel, to);
    case 2: return mix_spread<2>(a, dims, panel, to);
    case 3: return mix_spread<3>(a, dims, panel, to);
    case 4: return mix_spread<4>(a, dims, panel, to);
  }
  if constexpr (kMixRows > 4) {
    if (rows == 5) return mix_spread<5>(a, dims, panel, to);
    return mix_spread<6>(a, dims, panel, to);
  }
}

// The scratch of one work item; see mixture_item.
struct MixBuffers {
  float *panel, *squares;  // [D][kPanel], [groups][kPanel]
  float *spread, *maxima;  // [batch][kPanel], [batch * O][kLanes]
  float* logits;           // [batch * O][tokens]
  float* chunk;            // [D][16], where keys are decoded and a panel is shorter
};

inline void find_groups(const MixtureArgs& a, const float* variances, int64_t centers, SquareGroups& groups) {
  const int64_t dim = head_dim(a.tokens.cache);
  const auto same = [&](int64_t d, int64_t e) {
    for (int64_t c = 0; c < centers; ++c)
      if (variances[c * dim + d] != variances[c * dim + e]) return false;
    return true;
  };
  groups.count = 0;
  int32_t first[1024];  // a group's first dim; more groups than that are not merged
  for (int64_t d = 0; d < dim; ++d) {
    int64_t g = 0;
    const int64_t known = groups.count < 1024 ? groups.count : 1024;
    while (g < known && !same(first[g], d)) ++g;
    if (g == known) {
      g = groups.count++;
      if (g < 1024) first[g] = (int32_t)d;
      for (int64_t c = 0; c < centers; ++c)
        groups.weights[c * dim + g] = 0.5f * a.scale * a.scale * variances[c * dim + d];
    }
    groups.of[d] = (int32_t)g;
  }
  for (int64_t c = 1; c < centers; ++c)
    std::memmove(groups.weights + c * groups.count, groups.weights + c * dim, 4 * (size_t)groups.count);
}

// Keys of tokens t ... t + kPanel - 1 in fp32; masked tokens read as zero.
template <KeyRead kRead>
void load_panel(const TokensView& view, int64_t head, int64_t t, const int32_t* masked, const MixBuffers& to) {
  const int64_t stride = k_word_stride(view.cache);
  for (int v = 0; v < kPanelVectors; ++v) {
    const char* keys = tile_vector(view, head, t, v);
    const char* next = tile_vector(view, head, t + kPanel, v);
    float* panel = to.panel + v * kLanes;
    const vi live = masked == nullptr ? ~vi{} : ~load<vi>(masked + v * kLanes);
    for (int64_t w = 0; w < k_words(view.cache); ++w) {
      prefetch(next + w * stride);
      const vu words = (vu)((vi)load<vu>(keys + w * stride) & live);
      if constexpr (kRead == KeyRead::kF32) {
        store(panel + w * kPanel, words);
      } else {
        store(panel + 2 * w * kPanel, even(words));
        store(panel + (2 * w + 1) * kPanel, odd(words));
      }
    }
  }
}

inline void decode_panel(const TokensView& view, int64_t head, int64_t t, const int32_t* masked,
                         const MixBuffers& to) {
  constexpr int64_t kStep = kPanel < kChunkTokens ? kPanel : kChunkTokens;
  const int64_t dim = head_dim(view.cache);
  for (int64_t i = 0; i < kPanel; i += kStep) {
    if constexpr (kPanel < kChunkTokens) {  // a panel is a part of a chunk
      plain_keys_chunk(view.cache, chunk_of(view, head, t), to.chunk, kChunkTokens);
      for (int64_t d = 0; d < dim; ++d)
        std::memcpy(to.panel + d * kPanel, to.chunk + d * kChunkTokens + t % kChunkTokens, 4 * kPanel);
    } else {
      plain_keys_chunk(view.cache, chunk_of(view, head, t + i), to.panel + i, kPanel);
    }
  }
  for (int64_t at = 0; masked != nullptr && at < dim * kPanel; at += kLanes) {
    const vi live = ~load<vi>(masked + at % kPanel);
    store(to.panel + at, (vi)load<vu>(to.panel + at) & live);
  }
}

// The panel and the squares of its keys by group.
template <KeyRead kRead>
void fill_panel(const MixtureArgs& a, int64_t head, int64_t t, const int32_t* masked, const SquareGroups& groups,
                const MixBuffers& to) {
  if constexpr (kRead == KeyRead::kChunks)
    decode_panel(a.tokens, head, t, masked, to);
  else
    load_panel<kRead>(a.tokens, head, t, masked, to);
  const int64_t dim = head_dim(a.tokens.cache);
  std::memset(to.squares, 0, 4 * (size_t)(groups.count * kPanel));
  for (int64_t d = 0; d < dim; ++d) {
    float* sum = to.squares + groups.of[d] * kPanel;
    const float* panel = to.panel + d * kPanel;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      const vf x = load<vf>(panel + v * kLanes);
      store(sum + v * kLanes, load<vf>(sum + v * kLanes) + x * x);
    }
  }
}

// exp(logit - maximum) in place; returns the row's sum.
inline float exponentials(float* row, int64_t tokens, float top) {
  vf sums[2] = {};
  int64_t t = 0;
  for (; t + 2 * kLanes <= tokens; t += 2 * kLanes)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const vf e = expv(load<vf>(row + t + i * kLanes) - top);
      store(row + t + i * kLanes, e);
      sums[i] += e;
    }
  return hsum(sums[0] + sums[1]);
}

// best[j] = max(best[j], sum_o logits[o][j] / (O sum_o)) for one centre, whose rows hold exponentials.
inline void mean_and_max(const float* rows, int64_t stride, int64_t offsets, const float* factors, float* best) {
  for (int64_t t = 0; t < stride; t += kLanes) {
    vf mean = load<vf>(rows + t) * factors[0];
    for (int64_t o = 1; o < offsets; ++o) mean += load<vf>(rows + o * stride + t) * factors[o];
    store(best + t, vmax(load<vf>(best + t), mean));
  }
}

// What one item needs, in floats; panels cover tokens [first, first + tokens).
struct MixPlan {
  int64_t first, tokens;  // multiples of kPanel from the panel that holds `begin`
  int64_t centers;        // of a KV head: G * C
  int64_t parts;          // items per KV head
  int64_t batch;          // centres whose logits are held at once
};

inline MixPlan mix_plan(const MixtureArgs& a) {
  MixPlan plan;
  plan.first = a.begin / kPanel * kPanel;
  plan.tokens = ceil_div(a.end - plan.first, kPanel) * kPanel;
  plan.centers = a.query_heads / a.tokens.cache.heads * a.count;
  const int64_t heads = a.tokens.cache.heads, threads = max_threads();
  plan.parts = heads % threads == 0 ? 1 : ceil_div(2 * threads, heads);
  if (plan.parts > plan.centers) plan.parts = plan.centers;
  const int64_t most = ceil_div(plan.centers, plan.parts), fit = kMixScratch / (a.offsets * plan.tokens);
  plan.batch = fit < 4 ? 4 : fit;
  if (plan.batch > most) plan.batch = most;
  return plan;
}

// Centres [from, to) of a KV head into best [plan.tokens], from zero.
template <KeyRead kRead>
void mixture_item(const MixtureArgs& a, const MixPlan& plan, int64_t head, int64_t from, int64_t to, float* best) {
  constexpr bool kParts = kRead == KeyRead::kChunks && kPanel < kChunkTokens;
  const int64_t dim = head_dim(a.tokens.cache), offsets = a.offsets;
  const int64_t rows = plan.batch * offsets, all = to - from;
  float* scratch = thread_scratch(2 * dim * kPanel + plan.batch * kPanel + rows * kLanes + rows * plan.tokens +
                                  plan.centers * dim + dim + rows + (kParts ? dim * kChunkTokens : 0));
  MixBuffers buffers;
  buffers.panel = scratch;
  buffers.squares = buffers.panel + dim * kPanel;
  buffers.spread = buffers.squares + dim * kPanel;
  buffers.maxima = buffers.spread + plan.batch * kPanel;
  buffers.logits = buffers.maxima + rows * kLanes;
  SquareGroups groups;
  groups.weights = buffers.logits + rows * plan.tokens;
  groups.of = reinterpret_cast<int32_t*>(groups.weights + plan.centers * dim);
  float* factors = groups.weights + plan.centers * dim + dim;
  buffers.chunk = factors + rows;
  const int64_t first = head * plan.centers + from;
  find_groups(a, a.variances + head * plan.centers * dim, plan.centers, groups);
  std::memset(best, 0, 4 * (size_t)plan.tokens);

  for (int64_t done = 0; done < all; done += plan.batch) {
    const int64_t centers = all - done < plan.batch ? all - done : plan.batch;
    const float* mu = a.centers + (first + done) * offsets * dim;
    for (int64_t i = 0; i < centers * offsets * kLanes; ++i) buffers.maxima[i] = kMixMasked;
    for (int64_t t = 0; t < plan.tokens; t += kPanel) {
      alignas(64) int32_t mask[kPanel];
      const int64_t token = plan.first + t;
      const bool edge = token < a.begin || token + kPanel > a.end;
      for (int i = 0; edge && i < kPanel; ++i) mask[i] = token + i < a.begin || token + i >= a.end ? -1 : 0;
      const int32_t* masked = edge ? mask : nullptr;
      fill_panel<kRead>(a, head, token, masked, groups, buffers);
      in_row_blocks(centers, [&](int count, int64_t row) {
        mix_spread_rows(count, groups.weights + (from + done + row) * groups.count, groups.count, buffers.squares,
                        buffers.spread + row * kPanel);
      });
      in_row_blocks(centers * offsets, [&](int count, int64_t row) {
        const LogitBlock block{buffers.spread, row,         offsets,
                               a.scale,        masked,      buffers.logits + row * plan.tokens + t,
                               plan.tokens,    buffers.maxima + row * kLanes};
        mix_logit_rows(count, mu + row * dim, dim, buffers.panel, block);
      });
    }
    for (int64_t c = 0; c < centers; ++c) {
      float* logits = buffers.logits + c * offsets * plan.tokens;
      for (int64_t o = 0; o < offsets; ++o) {
        const float top = hmax(load<vf>(buffers.maxima + (c * offsets + o) * kLanes));
        factors[o] = 1.0f / ((float)offsets * exponentials(logits + o * plan.tokens, plan.tokens, top));
      }
      mean_and_max(logits, plan.tokens, offsets, factors, best);
    }
  }
}

inline void mixture_scores(const MixtureArgs& a) {
  const CacheView& cache = a.tokens.cache;
  const int64_t num_tokens = a.tokens.num_tokens;
  std::memset(a.out, 0, 4 * (size_t)(cache.heads * num_tokens));
  if (a.begin >= a.end || a.count == 0 || a.offsets == 0) return;
  const MixPlan plan = mix_plan(a);
  float* partial = call_scratch(cache.heads * plan.parts * plan.tokens);
  parallel_for(cache.heads * plan.parts, [&](int64_t item) {
    const int64_t head = item / plan.parts, part = item % plan.parts;
    const int64_t from = part * plan.centers / plan.parts, to = (part + 1) * plan.centers / plan.parts;
    float* best = partial + item * plan.tokens;
    switch (key_read(cache)) {
      case KeyRead::kF32: return mixture_item<KeyRead::kF32>(a, plan, head, from, to, best);
      case KeyRead::kBF16: return mixture_item<KeyRead::kBF16>(a, plan, head, from, to, best);
      case KeyRead::kChunks: return mixture_item<KeyRead::kChunks>(a, plan, head, from, to, best);
    }
  });
  for (int64_t head = 0; head < cache.heads; ++head)
    for (int64_t part = 0; part < plan.parts; ++part) {
      const float* best = partial + (head * plan.parts + part) * plan.tokens - plan.first;
      float* out = a.out + head * num_tokens;
      for (int64_t t = a.begin; t < a.end; ++t) out[t] = best[t] > out[t] ? best[t] : out[t];
    }
}

}  // namespace kvreclaim::KVR_NS
#endif
