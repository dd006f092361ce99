// Attention over caches that are not read as they lie: a tile's keys and values become fp32 panels in the
// thread's scratch, 64 tokens at a time, and the loops of tile.h run over those. One filling serves all rows.
#pragma once

#include "kvreclaim/decode.h"
#include "kvreclaim/item.h"

namespace kvreclaim::KVR_NS {

// keys [D][kTile], values [kTile][Dv]; tile points into them.
struct Panels {
  float *keys, *values;
  Tile tile;
};

KVR_INLINE int64_t panel_floats(const CacheView& c) { return kTile * (head_dim(c) + c.v_dim); }

inline Panels panels_in(const CacheView& c, float* scratch) {
  Panels panels{scratch, scratch + kTile * head_dim(c), {}};
  for (int i = 0; i < kChunks; ++i) {
    panels.tile.k[i] = reinterpret_cast<const char*>(panels.keys + i * kChunk);
    panels.tile.v[i] = reinterpret_cast<const char*>(panels.values + i * kChunk * c.v_dim);
  }
  return panels;
}

KVR_INLINE ChunkAt chunk_at(const AttentionArgs& a, const Item& item, int64_t slot) {
  const int64_t size = a.cache.block_size;
  return {a.layer, item.seq.block_ids[slot / size], item.head, slot % size};
}

// Asks for a coded chunk ahead of its use.
inline void prefetch_chunk(const CacheView& c, const ChunkAt& at) {
  if (is_plain(c.formats)) return;
  const char* own = unit(c, at.layer, at.block, at.head);
  const char* words = own + 4 * at.slot;
  for (int64_t w = 0; w < k_words(c); ++w, words += k_word_stride(c)) prefetch_near(words);
  const int64_t row_bytes = c.v_dim * bits_of(c.formats.v) / 8;
  const char* values = own + v_codes(c) + at.slot * row_bytes;
  for (int64_t i = 0; i < kChunk * row_bytes; i += 64) prefetch_near(values + i);
}

// Tokens at .. at + kTile of the item, up to item.high; what lies behind in the panels is anything, and masked.
inline void fill_panels(const AttentionArgs& a, const Item& item, int64_t at, bool with_values, const Panels& to) {
  for (int i = 0; i < kChunks; ++i) {
    const int64_t slot = at + i * kChunk;
    if (slot + kTile < item.high) prefetch_chunk(a.cache, chunk_at(a, item, slot + kTile));
    if (slot >= item.high) return;
    const ChunkAt chunk = chunk_at(a, item, slot);
    keys_chunk(a.cache, chunk, to.keys + i * kChunk, kTile);
    if (with_values)
      values_chunk(a.cache, chunk, smaller(kChunk, item.high - slot), to.values + i * kChunk * a.cache.v_dim);
  }
}

template <int R>
inline void panel_scores(const AttentionArgs& a, const Panels& panels, const float* q, float* scores) {
  const Ahead nothing{panels.tile, 0, 0};
  tile_scores<R, false>(q, panels.tile, nothing, head_dim(a.cache), kTile * sizeof(float), scores);
}

template <int R>
inline void panel_rows(const AttentionArgs& a, const Item& item, int64_t at, const Panels& panels,
                       const TileMask& mask, RowGroup& group, float* scores) {
  const int64_t tokens = smaller(kTile, smaller(item.high, group.end[R - 1]) - at), v_dim = a.cache.v_dim;
  if (tokens <= 0) return;
  panel_scores<R>(a, panels, group.q, scores);
  finish_scores<R>(a, item, group, at, mask, scores);
  float alpha[kMaxR];
  softmax_rows<R>(scores, group, alpha);
  const Ahead nothing{panels.tile, 0, 0};
  all_values<R, false>({panels.tile, tokens, v_dim, 4 * v_dim, group.acc, v_dim, scores, alpha, nothing});
}

inline void run_panels(const AttentionArgs& a, const Item& item, RowGroup* groups, int count, float* scratch) {
  alignas(64) float scores[kMaxR * kTile];
  const Panels panels = panels_in(a.cache, scratch);
  TileMask mask;
  for (int64_t at = first_tile(a, item); at < item.high; at += kTile) {
    open_mask(a, item, at, mask);
    fill_panels(a, item, at, true, panels);
    for (int g = 0; g < count; ++g) switch (groups[g].count) {
        case 1: panel_rows<1>(a, item, at, panels, mask, groups[g], scores); break;
        case 2: panel_rows<2>(a, item, at, panels, mask, groups[g], scores); break;
        case 3: panel_rows<3>(a, item, at, panels, mask, groups[g], scores); break;
        case 4: panel_rows<4>(a, item, at, panels, mask, groups[g], scores); break;
        default: panel_rows<kMaxR>(a, item, at, panels, mask, groups[g], scores);
      }
  }
}

}  // namespace kvreclaim::KVR_NS
