// y = x W^T + bias for packed weights (packed_codes.h), read once as they lie.
//
// Integers: x is rounded to 8 or 15 bits, with a scale for each row and 32 columns, and multiplied as integers; a product
// of a chunk becomes fp32 and takes its two scales. What that loses is 1/254 or 1/32512 of a chunk's largest |x|. A number
// of 15 bits is 128 high + low, two signed bytes that read the same codes. Exact: weights are widened to fp32 and
// multiplied by x. Either way a result is summed in an order that depends on K alone: it is the
// same, bit for bit, whatever the other rows and their number, and the integers are the same on every CPU.
#pragma once

#include "kvreclaim/packed_codes.h"

namespace kvreclaim {

enum class Activations : int { kInt8, kInt16, kExact };

// Matrices that share x, [M, K] contiguous; their outputs lie beside each other in y [M, sum of N], contiguous.
// bias: [sum of N] or null. x, bias and y are of one type; sums are fp32, bias included, and rounded once.
struct PackedArgs {
  const char* x;
  const PackedMatrix* const* matrices;
  int64_t count;
  const char* bias;
  char* y;
  int64_t rows, out;  // M, sum of N
  Type type;
  Activations activations;
};

// Rows of a packed matrix as numbers: ids [count] -> y [count, K], fp32 or bf16.
struct UnpackArgs {
  const PackedMatrix* matrix;
  const int64_t* ids;
  char* y;
  int64_t count;
  Type type;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <algorithm>
#include <vector>

#include "kvreclaim/memory.h"
#include "kvreclaim/packed_dot.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::packed_detail {

constexpr int kPanel = kRegisters >= 32 ? 8 : 4;  // rows of x that one pass over the weights serves
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kSerialWeights = 64 * 1024;     // a smaller product is not worth waking threads
constexpr int64_t kSumCols = 16;                  // columns whose bytes of x are summed

// Blocks that a tile of P rows of x reads at once, from distant places, so that the memory serves several streams.
constexpr int blocks_at_once(Grid grid, int panel) {
  if (kRegisters < 32) return panel == 1 ? 2 : 1;
  if (panel == 1) return has_supers(grid) ? 1 : 4;
  return panel <= 4 ? 2 : 1;
}

// x for a pass of `size` rows (of which the last may be zeros): [K / 4][size] words of bytes, of the low bytes too where
// x has two (else null), [K / 32][size] scales and sums of numbers in fp32, [K / 16][size] sums of numbers; exact:
// [K][size] fp32.
struct Panel {
  int32_t* words;
  int32_t* lows;
  float* scales;
  float* totals;
  int32_t* sums;
  float* numbers;
  int size;
};

template <Type T>
KVR_INLINE float number_at(const char* row, int64_t i) {
  return T == Type::kBF16 ? from_bf16(load<uint16_t>(row + 2 * i)) : load<float>(row + 4 * i);
}

template <Type T>
KVR_INLINE vf numbers_at(const char* row, int64_t i) {
  if constexpr (T == Type::kF32) return load<vf>(row + 4 * i);
  typedef uint16_t half __attribute__((vector_size(2 * kLanes)));
  return (vf)(__builtin_convertvector(load<half>(row + 2 * i), vu) << 16);
}

// A row of x as integers, in column `at` of a panel. A chunk with a number that is not finite has a scale that is not.
template <Type T>
inline void pack_row(const char* row, int64_t in, int64_t at, const Panel& panel) {
  const auto& [words, lows, scales, totals, sums, numbers, size] = panel;
  const float most = lows == nullptr ? 127.0f : 127.0f * kHighUnit;
  for (int64_t c = 0; c < in / kChunkCols; ++c) {
    vf x[kChunkCols / kLanes], largest_of{}, all_of{};
    for (int v = 0; v < kChunkCols / kLanes; ++v) {
      x[v] = numbers_at<T>(row, c * kChunkCols + v * kLanes);
      largest_of = vmax(largest_of, vmax(x[v], -x[v]));
      all_of += x[v] - x[v];
    }
    const float all = hsum(all_of), largest = std::max(hmax(largest_of), 1e-30f);
    const float inverse = most / largest;
    scales[c * size + at] = largest / most + all;
    int32_t rounded[kChunkCols];
    for (int v = 0; v < kChunkCols / kLanes; ++v) {
      const vf sum = unfused(x[v] * inverse) + 12582912.0f;  // 1.5 * 2^23 rounds; its bits are taken off
      store(&rounded[v * kLanes], (vi)sum - 0x4b400000);
    }
    if (all != 0.0f) std::fill(rounded, rounded + kChunkCols, 0);
    int32_t total = 0;
    for (int h = 0; h < 2; ++h) {
      int32_t sum = 0;
      for (int i = 0; i < kSumCols; ++i) sum += rounded[h * kSumCols + i];
      sums[(2 * c + h) * size + at] = sum;
      total += sum;
    }
    totals[c * size + at] = (float)total;
    int8_t bytes[2][kChunkCols];
    for (int i = 0; i < kChunkCols; i += kLanes) {
      const vi whole = load<vi>(&rounded[i]), high = (whole + (1 << (kLowBits - 1))) >> kLowBits;
      store_bytes(bytes[0] + i, (vu)(lows == nullptr ? whole : high));
      store_bytes(bytes[1] + i, (vu)(whole - high * kHighUnit));
    }
    for (int w = 0; w < kChunkCols / 4; ++w) {
      words[(c * kChunkCols / 4 + w) * size + at] = load<int32_t>(bytes[0] + 4 * w);
      if (lows != nullptr) lows[(c * kChunkCols / 4 + w) * size + at] = load<int32_t>(bytes[1] + 4 * w);
    }
  }
}

// Sums of a strip's products with P rows over one chunk, begun with what the codes' centres take off.
template <Codes C, Grid G, int P, bool kTwo, int kFirst, int kEnd>
KVR_INLINE void chunk_sums(const int8_t* table, const char* p, const Panel& x, int64_t chunk, vi* sums) {
  constexpr int kBias = C == Codes::kByte || C == Codes::kTable ? kSignedBias : centre_of(C, G);
#pragma GCC unroll 8
  for (int r = 0; r < P; ++r) {
    int32_t sum = 0;
    if constexpr (kBias != 0)
      for (int h = kFirst / 4; h < kEnd / 4; ++h) sum += x.sums[(2 * chunk + h) * P + r];
    sums[r] = splat_i(-kBias * sum);
  }
  const int64_t first = chunk * (kChunkCols / 4) * P;
  [[maybe_unused]] vi lows[kTwo ? P : 1];
  if constexpr (kTwo)
    for (int r = 0; r < P; ++r) lows[r] = sums[r], sums[r] = vi{};
  const auto word = [&](auto index) {
    constexpr int kWord = decltype(index)::value;
    vu codes = word_codes<C, kWord>(p);
    if constexpr (C == Codes::kTable) codes = look_up(table, codes);
#pragma GCC unroll 8
    for (int r = 0; r < P; ++r) {
      sums[r] = dot<C, kWord>(sums[r], codes, x.words + first + kWord * P + r);
      if constexpr (kTwo) lows[r] = dot<C, kWord>(lows[r], codes, x.lows + first + kWord * P + r);
    }
  };
  if constexpr (kFirst == 0) {
    word(std::integral_constant<int, 0>{});
    word(std::integral_constant<int, 1>{});
    word(std::integral_constant<int, 2>{});
    word(std::integral_constant<int, 3>{});
  }
  if constexpr (kEnd == 8) {
    word(std::integral_constant<int, 4>{});
    word(std::integral_constant<int, 5>{});
    word(std::integral_constant<int, 6>{});
    word(std::integral_constant<int, 7>{});
  }
  if constexpr (kTwo)
    for (int r = 0; r < P; ++r) sums[r] = (sums[r] << kLowBits) + lows[r];
}

// y[r] += the products of a strip's columns kFirst / 8 to kEnd / 8 of a chunk with P rows.
template <Codes C, Grid G, int P, bool kTwo, int kFirst, int kEnd>
KVR_INLINE void add_chunk(const PackedMatrix& m, int64_t block, int64_t lane, const char* p, const Panel& x,
                          int64_t chunk, const Line& super, vf* y) {
  constexpr bool kFine = C == Codes::kTable && kTwo;
  vi sums[P];
  [[maybe_unused]] vi lows[P];
  chunk_sums<C, G, P, kTwo, kFirst, kEnd>(kFine ? m.fine[0] : m.table, p, x, chunk, sums);
  if constexpr (kFine) chunk_sums<C, G, P, kTwo, kFirst, kEnd>(m.fine[1], p, x, chunk, lows);
  const int64_t col = chunk * kChunkCols + kFirst * 4;
  Line line = line_of<C, G>(m, block, col, lane, super);
  if constexpr (C == Codes::kTable) line.scale *= kFine ? m.fine_unit : m.unit;
  const vf zeros = G == Grid::kZero ? zeros_of(m, block, col, lane) : vf{};
#pragma GCC unroll 8
  for (int r = 0; r < P; ++r) {
    vf product = __builtin_convertvector(sums[r], vf);
    if constexpr (kFine) product = product * (float)kHighUnit + __builtin_convertvector(lows[r], vf);
    if constexpr (G == Grid::kZero) product -= zeros * x.totals[chunk * P + r];  // of integers below 2^24: exact
    product *= line.scale;
    if constexpr (has_halves(C, G) && has_offset(G))
      product += line.offset * (float)x.sums[(2 * chunk + kFirst / 4) * P + r];
    else if constexpr (has_offset(G))
      product += line.offset * x.totals[chunk * P + r];
    y[r] += product * x.scales[chunk * P + r];
  }
}

// Blocks `first`, `first + apart`, ... of a matrix times a panel; sums are handed to write(block, lane, r, sum).
template <Codes C, Grid G, int P, int B, bool kTwo, class Write>
inline void integer_tile(const PackedMatrix& m, int64_t first, int64_t apart, const Panel& x, const Write& write) {
  constexpr int kVectors = B * kStrips;
  const int64_t chunks = m.in / kChunkCols, bytes = lines_of(C) * kLine;
  vf y[kVectors][P] = {};
  Line supers[kVectors] = {};
  const char* p = m.data + first * chunks * bytes;
  for (int64_t c = 0; c < chunks; ++c, p += bytes)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int64_t block = first + v / kStrips * apart;
      const int lane = v % kStrips * kLanes;
      const char* at = p + v / kStrips * apart * chunks * bytes;
      if (c % (kSuperCols / kChunkCols) == 0) supers[v] = super_of<C, G>(m, block, c * kChunkCols, lane);
      if (lane == 0)
        for (int64_t b = 0; b < bytes; b += kLine) prefetch(at + 8 * bytes + b);
      if constexpr (has_halves(C, G)) {
        add_chunk<C, G, P, kTwo, 0, 4>(m, block, lane, at + lane * 4, x, c, supers[v], y[v]);
        add_chunk<C, G, P, kTwo, 4, 8>(m, block, lane, at + lane * 4, x, c, supers[v], y[v]);
      } else {
        add_chunk<C, G, P, kTwo, 0, 8>(m, block, lane, at + lane * 4, x, c, supers[v], y[v]);
      }
    }
  for (int v = 0; v < kVectors; ++v)
    for (int r = 0; r < P; ++r) write(first + v / kStrips * apart, v % kStrips * kLanes, r, y[v][r]);
}

template <Codes C, Grid G, int P, class Write>
inline void exact_tile(const PackedMatrix& m, int64_t block, const Panel& x, const Write& write) {
  for (int s = 0; s < kStrips; ++s) {
    vf y[P] = {}, w[kChunkCols];
    for (int64_t c = 0; c < m.in / kChunkCols; ++c) {
      chunk_weights<C, G>(m, block, c, s * kLanes, w);
      const float* numbers = x.numbers + c * kChunkCols * P;
      for (int j = 0; j < kChunkCols; ++j)
#pragma GCC unroll 8
        for (int r = 0; r < P; ++r) y[r] += w[j] * numbers[j * P + r];
    }
    for (int r = 0; r < P; ++r) write(block, s * kLanes, r, y[r]);
  }
}

template <Codes C, Grid G, int P, bool kTwo, class Write>
inline void integer_blocks(const PackedMatrix& m, int64_t first, int64_t end, const Panel& x, const Write& write) {
  constexpr int kAtOnce = blocks_at_once(G, P);
  const int64_t apart = (end - first) / kAtOnce;
  for (int64_t i = 0; i < apart; ++i) integer_tile<C, G, P, kAtOnce, kTwo>(m, first + i, apart, x, write);
  for (int64_t b = first + apart * kAtOnce; b < end; ++b) integer_tile<C, G, P, 1, kTwo>(m, b, 0, x, write);
}

// Blocks first to end - 1 of a matrix times one panel of P rows.
template <Codes C, Grid G, int P, class Write>
inline void blocks_times(const PackedMatrix& m, int64_t first, int64_t end, const Panel& x, const Write& write) {
  if (x.numbers != nullptr) {
    for (int64_t b = first; b < end; ++b) exact_tile<C, G, P>(m, b, x, write);
    return;
  }
  x.lows == nullptr ? integer_blocks<C, G, P, false>(m, first, end, x, write)
                    : integer_blocks<C, G, P, true>(m, first, end, x, write);
}

// What all threads of a call share.
struct Call {
  const PackedArgs& args;
  std::vector<Panel> panels;
};

// Some blocks of a matrix, whose outputs begin at `col` of y.
struct Share {
  const PackedMatrix* matrix;
  int64_t first, end, col;
};

// One share times all panels. Passes over a few blocks, so that they stay in the nearest cache between panels.
struct ShareTimes {
  const Call& call;
  const Share& share;

  template <Codes C, Grid G>
  void run() const {
    const int64_t step = call.panels.size() > 1 ? 1 : share.end - share.first;
    for (int64_t b = share.first; b < share.end; b += step)
      for (size_t i = 0; i < call.panels.size(); ++i) times<C, G>(b, std::min(b + step, share.end), (int64_t)i);
  }

  template <Codes C, Grid G>
  void times(int64_t first, int64_t end, int64_t index) const {
    const Panel& x = call.panels[index];
    const auto write = [&](int64_t block, int64_t lane, int64_t r, vf sum) {
      const int64_t row = index * kPanel + r, from = block * kBlockRows + lane;
      if (row < call.args.rows) put(row, from, std::min<int64_t>(kLanes, share.matrix->out - from), sum);
    };
    if (x.size == 1) return blocks_times<C, G, 1>(*share.matrix, first, end, x, write);
    if (x.size == 2) return blocks_times<C, G, 2>(*share.matrix, first, end, x, write);
    if (x.size == 4) return blocks_times<C, G, 4>(*share.matrix, first, end, x, write);
    if constexpr (kPanel == 8) blocks_times<C, G, 8>(*share.matrix, first, end, x, write);
  }

  void put(int64_t row, int64_t from, int64_t count, vf sum) const {
    const PackedArgs& a = call.args;
    const int64_t at = share.col + from, size = size_of(a.type);
    char* to = a.y + (row * a.out + at) * size;
    for (int64_t i = 0; i < count; ++i) {
      const char* bias = a.bias + (at + i) * size;
      if (a.type == Type::kBF16) {
        const float x = sum[i] + (a.bias == nullptr ? 0.0f : from_bf16(load<uint16_t>(bias)));
        store(to + 2 * i, to_bf16(x));
      } else {
        store(to + 4 * i, sum[i] + (a.bias == nullptr ? 0.0f : load<float>(bias)));
      }
    }
  }
};

KVR_INLINE int panel_size(int64_t rows) {
  return rows >= kPanel ? kPanel : rows > 4 ? 8 : rows > 2 ? 4 : (int)rows;
}

// Words of a panel's memory for each row.
KVR_INLINE int64_t panel_words(Activations kind, int64_t in) {
  if (kind == Activations::kExact) return in;
  return (kind == Activations::kInt16 ? 2 : 1) * (in / 4) + 2 * (in / kChunkCols) + in / kSumCols;
}

inline Panel panel_at(Activations kind, int64_t in, int size, float* at) {
  if (kind == Activations::kExact) return {nullptr, nullptr, nullptr, nullptr, nullptr, at, size};
  int32_t* words = reinterpret_cast<int32_t*>(at);
  const int64_t part = in / 4 * size;
  const bool has_lows = kind == Activations::kInt16;
  float *scales = at + (has_lows ? 2 : 1) * part, *totals = scales + in / kChunkCols * size;
  int32_t* sums = reinterpret_cast<int32_t*>(totals + in / kChunkCols * size);
  return {words, has_lows ? words + part : nullptr, scales, totals, sums, nullptr, size};
}

// x in panels, in scratch of the call.
template <Type T>
inline void pack_x(const PackedArgs& a, int64_t in, std::vector<Panel>& panels) {
  const int64_t row_words = panel_words(a.activations, in);
  const int64_t full = (a.rows + kPanel - 1) / kPanel;
  float* memory = call_scratch(full * kPanel * row_words);
  for (int64_t i = 0; i < full; ++i) {
    const int size = panel_size(std::min<int64_t>(kPanel, a.rows - i * kPanel));
    panels.push_back(panel_at(a.activations, in, size, memory + i * kPanel * row_words));
  }
  parallel_for(full, [&](int64_t i) {
    const Panel& p = panels[i];
    for (int64_t r = 0; r < p.size; ++r) {
      // A row that is not there is a copy of the last, whose sums are not used.
      const char* row = a.x + std::min(i * kPanel + r, a.rows - 1) * in * size_of(T);
      if (p.numbers == nullptr) {
        pack_row<T>(row, in, r, p);
        continue;
      }
      for (int64_t k = 0; k < in; ++k) p.numbers[k * p.size + r] = number_at<T>(row, k);
    }
  });
}

struct Unpack {
  const UnpackArgs& args;
  int64_t first, end;

  template <Codes C, Grid G>
  void run() const {
    const PackedMatrix& m = *args.matrix;
    vf w[kChunkCols];
    for (int64_t i = first; i < end; ++i) {
      const int64_t row = args.ids[i], lane = row % kBlockRows;
      for (int64_t c = 0; c < m.in / kChunkCols; ++c) {
        chunk_weights<C, G>(m, row / kBlockRows, c, lane / kLanes * kLanes, w);
        for (int64_t j = 0; j < kChunkCols; ++j) {
          const float x = w[j][lane % kLanes];
          const int64_t at = i * m.in + c * kChunkCols + j;
          if (args.type == Type::kBF16)
            store(args.y + 2 * at, to_bf16(x));
          else
            store(args.y + 4 * at, x);
        }
      }
    }
  }
};

inline void panel_linear(const PackedArgs& a) {
  const int64_t in = a.matrices[0]->in;
  Call call{a, {}};
  a.type == Type::kBF16 ? pack_x<Type::kBF16>(a, in, call.panels) : pack_x<Type::kF32>(a, in, call.panels);
  const int64_t blocks = (a.out + kBlockRows - 1) / kBlockRows;
  const int64_t items = in * a.out < kSerialWeights || max_threads() == 1 ? 1 : max_threads() * kItemsPerThread;
  const int64_t step = (blocks + items - 1) / items;
  std::vector<Share> shares;
  for (int64_t i = 0, col = 0; i < a.count; col += a.matrices[i++]->out) {
    const int64_t own = (a.matrices[i]->out + kBlockRows - 1) / kBlockRows;
    for (int64_t b = 0; b < own; b += step) shares.push_back({a.matrices[i], b, std::min(b + step, own), col});
  }
  const auto work = [&](int64_t i) { with_kind(*shares[i].matrix, ShareTimes{call, shares[i]}); };
  if (items == 1) {
    for (size_t i = 0; i < shares.size(); ++i) work((int64_t)i);
    return;
  }
  parallel_for((int64_t)shares.size(), work);
}

}  // namespace kvreclaim::KVR_NS::packed_detail

namespace kvreclaim::KVR_NS {

inline void unpack_rows(const UnpackArgs& a) {
  using namespace packed_detail;
  constexpr int64_t kRows = 4;
  parallel_for((a.count + kRows - 1) / kRows, [&](int64_t i) {
    with_kind(*a.matrix, Unpack{a, i * kRows, std::min((i + 1) * kRows, a.count)});
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
