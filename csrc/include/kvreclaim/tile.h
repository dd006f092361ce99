// The three inner loops of attention over one tile of tokens: scores, softmax, weighted values.
//
// A tile is kTile slots, kChunks chunks of 16. S is a multiple of 16, so a chunk never leaves its block.
// Query rows (query heads of one KV head, times query tokens) go through in groups of R <= kMaxR, which share
// every load and conversion of K and V. Scores: lanes are tokens. Values: lanes are dims.
#pragma once

#include "kvreclaim/layout.h"
#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

constexpr int kChunk = 16;
constexpr int kTile = 64;
constexpr int kChunks = kTile / kChunk;
constexpr int kMaxR = kRegisters == 32 ? 8 : 4;

// Token vectors that share a broadcast of q, and vectors of V words that share one of p: with R rows they
// make the accumulators that fit into the registers.
template <int R>
constexpr int kTokenVecs = kRegisters == 32 ? (R > 4 ? 2 : 4) : 2;
template <int R>
constexpr int kWordVecs = kRegisters == 32 && R <= 4 ? 2 : 1;
constexpr float kNegInf = -__builtin_inff();

// Where a tile's tokens lie: first byte of each chunk's keys and values. Chunks past the last token repeat
// the last one, so that every address is readable.
struct Tile {
  const char* k[kChunks];
  const char* v[kChunks];
};

// The part of the next tile that a group of rows fetches in its loops: slots first .. end of its values and as many
// 64ths of the words of its keys. So every line is fetched once, and the memory is never idle for long.
struct Ahead {
  const Tile& tile;
  int64_t first, end;
};

// Whether step `i` of `steps` is one in which a part is fetched.
class AheadSteps {
 public:
  KVR_INLINE AheadSteps(const Ahead& ahead, int64_t steps)
      : first_(ahead.first * steps / kTile), count_(ahead.end * steps / kTile - first_) {}
  KVR_INLINE bool has(int64_t i) const { return (uint64_t)(i - first_) < (uint64_t)count_; }

 private:
  int64_t first_, count_;
};

// s[r * kTile + t] = q[., r] . K[., t] for R rows and all tokens of the tile; q is [D][R].
template <int R, bool BF16>
KVR_KERNEL void tile_scores(const float* q, const Tile& tile, const Ahead& ahead, int64_t words, int64_t stride,
                            float* s) {
  const AheadSteps asks(ahead, words);
  constexpr int T = kTokenVecs<R>;
  constexpr int kPerChunk = kChunk / kLanes;
  constexpr int kPasses = kTile / kLanes / T;
  for (int pass = 0; pass < kPasses; ++pass) {
    const char *base[T], *far[T];
    for (int t = 0; t < T; ++t) {
      const int vec = pass * T + t;
      base[t] = tile.k[vec / kPerChunk] + vec % kPerChunk * (int)sizeof(vf);
      far[t] = ahead.tile.k[vec / kPerChunk];
    }
    vf acc[R][T] = {};
    const float* row = q;
    for (int64_t w = 0, at = 0; w < words; ++w, at += stride) {
#pragma GCC unroll 2
      for (int half = 0; half < (BF16 ? 2 : 1); ++half) {
        vf k[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const vu x = load<vu>(base[t] + at);
          k[t] = !BF16 ? (vf)x : half == 0 ? even(x) : odd(x);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const vf b = splat(row[r]);
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) acc[r][t] += k[t] * b;
        }
        row += R;
      }
      if (asks.has(w)) {
#pragma GCC unroll 4
        for (int t = 0; t < T; t += kPerChunk) prefetch_near(far[t] + at);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) store(s + r * kTile + (pass * T + t) * kLanes, acc[r][t]);
  }
}

#if defined(__AVX512BF16__)
// tile_scores by products of pairs of bf16: q is [D / 2][R] such pairs, unscaled.
template <int R>
KVR_KERNEL void pair_scores(const uint32_t* q, const Tile& tile, const Ahead& ahead, int64_t words, int64_t stride,
                            float scale, float* s) {
  const AheadSteps asks(ahead, words);
  constexpr int T = kTokenVecs<R>, kPasses = kChunks / T;
  for (int pass = 0; pass < kPasses; ++pass) {
    __m512 acc[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = _mm512_setzero_ps();
    const uint32_t* row = q;
    for (int64_t w = 0, at = 0; w < words; ++w, at += stride, row += R) {
      __m512bh k[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) k[t] = (__m512bh)_mm512_loadu_si512(tile.k[pass * T + t] + at);
      if (asks.has(w)) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) prefetch_near(ahead.tile.k[pass * T + t] + at);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)row[r]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[r][t] = pairs(acc[r][t], k[t], pair);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) store(s + r * kTile + (pass * T + t) * kChunk, (vf)acc[r][t] * scale);
  }
}
#endif

// What the values' loops share.
struct ValueRows {
  const Tile& tile;
  int64_t tokens, words, row_bytes;  // words: 4-byte words of a row
  float* acc;                        // [R][stride]
  int64_t stride;
  const float* p;      // [R][kTile]
  const float* alpha;  // [R]
  const Ahead& ahead;
};

// acc[r] = acc[r] * alpha[r] + sum_t p[r * kTile + t] V[t], for C * N words of each row of V from `word` on.
// acc[r] holds the dims of a word vector as N even ones, then N odd ones (bf16), or in order (fp32).
template <int R, int C, int N, bool BF16>
KVR_KERNEL void tile_values(const ValueRows& in, int64_t word) {
  using F = typename Vec<N>::F;
  using U = typename Vec<N>::U;
  constexpr int P = BF16 ? 2 : 1;  // values of a word
  constexpr int kLines = C * N >= 16 ? C * N / 16 : 1;
  const AheadSteps asks(in.ahead, kTile);
  float* acc = in.acc + word * P;
  F sum[R][C][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
      for (int h = 0; h < P; ++h)
        sum[r][c][h] = load<F>(acc + r * in.stride + (c * P + h) * N) * in.alpha[r];
  const float* p = in.p;
  for (int64_t chunk = 0; chunk * kChunk < in.tokens; ++chunk) {
    const int64_t left = in.tokens - chunk * kChunk;
    const int64_t count = left < kChunk ? left : kChunk;
    const char* row = in.tile.v[chunk] + word * 4;
    const char* far = in.ahead.tile.v[chunk] + word * 4;
    for (int64_t j = 0; j < count; ++j, ++p, row += in.row_bytes, far += in.row_bytes) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const U x = load<U>(row + c * (int)sizeof(U));
#pragma GCC unroll 2
        for (int h = 0; h < P; ++h) {
          const F v = !BF16 ? (F)x : h == 0 ? even(x) : odd(x);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r][c][h] += v * p[r * kTile];
        }
      }
      if (asks.has(chunk * kChunk + j)) {
#pragma GCC unroll 4
        for (int i = 0; i < kLines; ++i) prefetch_near(far + 64 * i);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
      for (int h = 0; h < P; ++h) store(acc + r * in.stride + (c * P + h) * N, sum[r][c][h]);
}

// All words of the rows of V: wide passes first, narrower ones for the rest.
template <int R, bool BF16, int N = kLanes>
inline void all_values(const ValueRows& in, int64_t word = 0) {
  constexpr int C = BF16 ? kWordVecs<R> : 2 * kWordVecs<R>;
  if constexpr (N == kLanes) {
    for (; word + C * N <= in.words; word += C * N) tile_values<R, C, N, BF16>(in, word);
  }
  for (; word + N <= in.words; word += N) tile_values<R, 1, N, BF16>(in, word);
  if constexpr (N > 4) {
    if (word < in.words) all_values<R, BF16, N / 2>(in, word);
  }
}

// Where the slots of a tile are at positions of their own: the window then looks at each.
struct TileMask {
  bool has_positions;
  int32_t positions[kTile];  // logical position of each slot
};

// Up to kMaxR rows that go through a tile together.
struct RowGroup {
  int64_t count;
  float* q;                  // [D][count], scaled
  float* acc;                // [count][Dv] in tile_values' order of dims
  int64_t low[kMaxR];        // first slot that each row sees by its window
  int64_t end[kMaxR];        // one past the last slot that it sees; ascending
  Vec<kMaxR>::F m;           // running maximum of each row's scores, log2 units
  vf sum[kMaxR];             // running sum of its weights, per lane
};

struct RowBounds {
  int32_t low, high;       // slots of the tile it sees: low <= t < high
  int32_t first_position;  // with TileMask::positions: positions >= this are seen
};

// Softcapped scores in log2 units; cap is softcap * log2(e).
KVR_INLINE void softcap_row(float* s, float cap) {
  for (int t = 0; t < kTile; t += kLanes) store(s + t, tanhv(load<vf>(s + t)) * cap);
}

KVR_INLINE void mask_row(float* s, const RowBounds& bounds, const TileMask& mask) {
  const vf hidden = splat(kNegInf);
  for (int t = 0; t < kTile; t += kLanes) {
    const vi slot = iota() + t;
    vi seen = (slot >= bounds.low) & (slot < bounds.high);
    if (mask.has_positions) seen &= load<vi>(mask.positions + t) >= bounds.first_position;
    store(s + t, select(seen, load<vf>(s + t), hidden));
  }
}

// Scores of R rows -> weights 2^(s - m), in place; alpha[r] is the factor for what was summed before.
template <int R>
KVR_KERNEL void softmax_rows(float* s, RowGroup& group, float* alpha) {
  using M = Vec<kMaxR>::F;
  M best = splat<M>(kNegInf);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    vf top = load<vf>(s + r * kTile);
#pragma GCC unroll 16
    for (int t = kLanes; t < kTile; t += kLanes) top = vmax(top, load<vf>(s + r * kTile + t));
    best[r] = hmax(top);
  }
  const M m = vmax(group.m, best);
  const M base = select(m == splat<M>(kNegInf), M{}, m);
  const M factor = exp2v(group.m - base);
  group.m = m;
  store(alpha, factor);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* row = s + r * kTile;
    vf sum = group.sum[r] * factor[r];
#pragma GCC unroll 16
    for (int t = 0; t < kTile; t += kLanes) {
      const vf p = exp2v(load<vf>(row + t) - base[r]);
      store(row + t, p);
      sum += p;
    }
    group.sum[r] = sum;
  }
}

}  // namespace kvreclaim::KVR_NS
