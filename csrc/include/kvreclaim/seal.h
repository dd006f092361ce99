// kivi4's new tokens: to the rows of blocks that are not full, and full blocks encoded, keys by channel.
// Oracle: ops/reference/kivi.py (write), kivi_codec.py (seal).
#pragma once

#include "kvreclaim/layout.h"

namespace kvreclaim {

// What ops/formats/open_blocks.py calls Writes: where the tokens of a write go.
struct SealArgs {
  CacheView cache;
  int64_t layer;
  RowsView k, v;  // [T, K, D], [T, K, Dv]; any strides, any type
  const int64_t *tokens, *rows, *offsets;  // [num_tokens] of blocks that this write does not fill alone
  int64_t num_tokens;
  const int64_t* whole;  // [num_whole, S] tokens of the blocks that it does
  int64_t num_whole;
  const int64_t* ended;  // [num_ended] rows of the blocks that it ends
  int64_t num_ended;
  const int64_t* sealed;  // [num_whole + num_ended] blocks
  const int64_t* opened;  // [num_opened] blocks that it begins and does not end
  int64_t num_opened;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <cstring>

#include "kvreclaim/encode_chunk.h"
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

// The keys or values of all slots of a block, before it is sealed.
struct BlockRows {
  RowsView x;            // of the write; or of an open row, where token is null
  const int64_t* token;  // [S]

  KVR_INLINE const char* at(int64_t slot, int64_t head) const {
    return row_of(x, token == nullptr ? slot : token[slot], head);
  }
};

// Numbers as an open row holds them, bounded.
inline void round_rows(Type type, float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const vf y = load<vf>(x + i);
    store(x + i, bounded(type == Type::kBF16 ? y : (vf)round_bf16(y)));
  }
}

// to[slot * stride + d], zeros from D to the stride.
inline void load_rows(const BlockRows& rows, int64_t head, int64_t size, int64_t dims, float* to, int64_t stride) {
  for (int64_t slot = 0; slot < size; ++slot) {
    float* own = to + slot * stride;
    const char* row = rows.at(slot, head);
    if (rows.x.stride_d == 1)
      row_values((Format)rows.x.type, row, dims, {1, 0, dims, own, dims});
    else
      for (int64_t d = 0; d < dims; ++d) own[d] = element(rows.x.type, row, d * rows.x.stride_d);
    for (int64_t d = dims; d < stride; ++d) own[d] = 0;
  }
  round_rows(rows.x.type, to, size * stride);
}

// The stride of keys' rows, whole vectors of channels.
KVR_INLINE int64_t channels_of(int64_t dims) { return (dims + 15) / 16 * 16; }

// Eight slots' codes of a channel in a word: to[slot / 8 * stride + d], and the channels' parameters.
inline void encode_channels(const CacheView& c, char* own, const float* x, int64_t stride, float* to) {
  for (int64_t d = 0; d < c.k_dim; d += kLanes) {
    vf low = load<vf>(x + d), high = low;
    for (int64_t slot = 1; slot < c.block_size; ++slot) {
      const vf y = load<vf>(x + slot * stride + d);
      low = vmin(low, y), high = vmax(high, y);
    }
    const GroupLanes group = group_of<ChannelGrid>(low, high);
    const size_t count = c.k_dim - d < kLanes ? c.k_dim - d : kLanes;
    const LaneBytes centres = __builtin_convertvector(group.centre_code, LaneBytes);
    const LaneBytes scales = __builtin_convertvector(group.scale_code, LaneBytes);
    std::memcpy(own + params(c) + d, &centres, count);
    std::memcpy(own + params(c) + c.k_dim + d, &scales, count);
    for (int64_t slot = 0; slot < c.block_size; slot += 8) {
      vu word{};
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) word |= group.codes(load<vf>(x + (slot + j) * stride + d)) << (4 * j);
      store(to + slot / 8 * stride + d, word);
    }
  }
}

KVR_INLINE int64_t seal_keys_floats(const CacheView& c) {
  return channels_of(c.k_dim) * (c.block_size + c.block_size / 8);
}

inline void seal_keys(const CacheView& c, char* own, const BlockRows& rows, int64_t head, float* x) {
  const int64_t stride = channels_of(c.k_dim), state = kivi_params(c).state;
  float* words = x + c.block_size * stride;
  load_rows(rows, head, c.block_size, c.k_dim, x, stride);
  encode_channels(c, own, x, stride, words);
  for (int64_t d = 0; d < c.k_dim; d += 8)
    for (int64_t slot = 0; slot < c.block_size; slot += 8)
      store(own + d / 8 * k_word_stride(c) + 4 * slot,
            exchange_halves(load<Eight::U>(words + slot / 8 * stride + d)));
  for (int64_t i = 2 * c.k_dim; i <= state; ++i) own[params(c) + i] = 0;
}

// Centres of 16 slots, 0 ... 31: the low halves in pairs, then the fifth bits.
inline void put_centres(char* low, char* high, const uint8_t* centres) {
  for (int i = 0; i < 8; ++i) low[i] = (char)((centres[2 * i] & 15) | centres[2 * i + 1] << 4);
  for (int i = 0; i < 2; ++i) {
    int bits = 0;
    for (int j = 0; j < 8; ++j) bits |= centres[8 * i + j] >> 4 << j;
    high[i] = (char)bits;
  }
}

inline void seal_values(const CacheView& c, char* own, int64_t slot, const BlockRows& rows, int64_t head, float* x) {
  const KiviParams at = kivi_params(c);
  char* bytes = own + params(c);
  float* words = x + c.v_dim * kChunkTokens;
  TokenRows sixteen{{}, rows.x.type, rows.x.stride_d};
  for (int i = 0; i < kChunkTokens; ++i) sixteen.at[i] = rows.at(slot + i, head);
  load_panel(sixteen, c.v_dim, x);
  round_rows(rows.x.type, x, c.v_dim * kChunkTokens);
  for (int64_t begin = 0; begin < c.v_dim; begin += kGroup) {
    const int64_t end = begin + kGroup < c.v_dim ? begin + kGroup : c.v_dim;
    const int64_t index = begin / kGroup * c.block_size + slot;
    uint8_t centres[kChunkTokens];
    for (int t = 0; t < kChunkTokens; t += kLanes) {
      const Lanes a{c, own, slot + t, false, c.v_dim, x + t, reinterpret_cast<char*>(words + t), 4 * kChunkTokens};
      const GroupLanes group = group_of<ValueGrid>(a, begin, end, 1.0f);
      put_bytes(bytes + at.v_scales + index + t, group.scale_code);
      put_bytes(centres + t, group.centre_code);
      put_words<4>(a, begin, end, [&](int64_t d) { return group.codes(a.at(d)); });
    }
    put_centres(bytes + at.v_low + index / 2, bytes + at.v_high + index / 8, centres);
  }
  put_value_words(c, own, slot, words);
}

inline void seal_block(const SealArgs& a, int64_t index, int64_t head) {
  const CacheView& c = a.cache;
  char* own = unit(c, a.layer, a.sealed[index], head);
  const bool is_whole = index < a.num_whole;
  const auto rows_of = [&](const RowsView& x, char* open, int64_t dim) -> BlockRows {
    if (is_whole) return {x, a.whole + index * c.block_size};
    char* own_rows = open_unit(c, open, dim, a.ended[index - a.num_whole], a.layer, 0, head);
    return {{own_rows, dim, 0, 1, Type::kBF16}, nullptr};
  };
  const int64_t k_floats = seal_keys_floats(c), v_floats = encode_chunk_floats(c.v_dim);
  float* x = thread_scratch(k_floats > v_floats ? k_floats : v_floats);
  seal_keys(c, own, rows_of(a.k, c.open_k, c.k_dim), head, x);
  const BlockRows values = rows_of(a.v, c.open_v, c.v_dim);
  for (int64_t slot = 0; slot < c.block_size; slot += kChunkTokens) seal_values(c, own, slot, values, head, x);
}

inline void keep_rows(const SealArgs& a, const RowsView& x, char* open, int64_t dim, int64_t head) {
  for (int64_t i = 0; i < a.num_tokens; ++i) {
    const char* row = row_of(x, a.tokens[i], head);
    char* to = open_unit(a.cache, open, dim, a.rows[i], a.layer, 0, head) + a.offsets[i] * dim * 2;
    if (x.type == Type::kBF16 && x.stride_d == 1)
      std::memcpy(to, row, 2 * dim);
    else
      for (int64_t d = 0; d < dim; ++d) store(to + 2 * d, to_bf16(element(x.type, row, d * x.stride_d)));
  }
}

inline void seal_tokens(const SealArgs& a) {
  const CacheView& c = a.cache;
  for (int64_t head = 0; head < c.heads; ++head) {
    keep_rows(a, a.k, c.open_k, c.k_dim, head);
    keep_rows(a, a.v, c.open_v, c.v_dim, head);
  }
  for (int64_t i = 0; i < a.num_opened; ++i)
    for (int64_t head = 0; head < c.heads; ++head)
      unit(c, a.layer, a.opened[i], head)[params(c) + kivi_params(c).state] = (char)kKiviOpen;
  parallel_for((a.num_whole + a.num_ended) * c.heads,
               [&](int64_t item) { seal_block(a, item / c.heads, item % c.heads); });
}

}  // namespace kvreclaim::KVR_NS
#endif
