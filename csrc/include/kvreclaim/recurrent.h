// Tokens of several sequences through the convolution and the state of a recurrent layer: steps of one token each from
// slot to slot, prompts by the scan. Sums in fp32; results are rounded to the type of the rows where transformers'
// modules round. A sequence does not depend on the others.
#pragma once

#include "kvreclaim/recurrent_rows.h"
#include "kvreclaim/recurrent_scan.h"
#include "kvreclaim/recurrent_selective.h"

namespace kvreclaim::KVR_NS::recurrent_detail {

// Channels [first, first + count) of one row into y; kWidth is width and kept if it is not 0.
template <Type T, int kWidth>
inline void convolve(const ConvStep& c, const char* x, const char* from, char* to, int64_t first, int64_t count,
                     float* y) {
  const int64_t width = kWidth ? kWidth : c.width, kept = kWidth ? kWidth : c.kept, size = size_of(T);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t channel = first + i;
    const char *weight = c.weight + channel * width * size, *old = from + channel * kept * size;
    char* next = to + channel * kept * size;
    const float newest = at<T>(x, i);
    float sum = c.bias == nullptr ? 0.0f : at<T>(c.bias, channel);
    for (int64_t j = 0; j + 1 < width; ++j) sum += at<T>(weight, j) * at<T>(old, kept - width + 1 + j);
    y[i] = sum + at<T>(weight, width - 1) * newest;
    __builtin_memmove(next, old + size, (size_t)((kept - 1) * size));
    put<T>(next, kept - 1, newest);
  }
}

// y [N, channels]: SiLU of the convolution.
template <Type T>
inline void convolve_rows(const StepRows& s, const ConvStep& c, float* y) {
  const int64_t slot_bytes = c.channels * c.kept * size_of(T);
  parallel_for(s.count * c.num_pieces, [&](int64_t item) {
    const int64_t row = item / c.num_pieces;
    const int64_t* piece = c.pieces + 3 * (item % c.num_pieces);
    const char* x = s.rows + (row * s.stride + piece[0]) * size_of(T);
    const char* from = c.states + s.read[row] * slot_bytes;
    char* to = c.states + s.write[row] * slot_bytes;
    float* own = y + row * c.channels + piece[1];
    if (c.width == 4 && c.kept == 4)
      convolve<T, 4>(c, x, from, to, piece[1], piece[2], own);
    else
      convolve<T, 0>(c, x, from, to, piece[1], piece[2], own);
    silu_row<T>(own, piece[2]);
  });
}

// Delta rule for the columns of one V: rows of the state are `stride` floats apart.
template <class V>
KVR_INLINE void delta_columns(const float* from, float* to, int64_t stride, const float* q, const float* k, const Gate& gate,
                              const float* v, float* y, int64_t k_dim) {
  V by_k{}, by_q{};
  for (int64_t d = 0; d < k_dim; ++d) {
    const V state = load<V>(from + d * stride);
    by_k += state * splat<V>(k[d]);
    by_q += state * splat<V>(q[d]);
  }
  const V delta = (load<V>(v) - by_k * splat<V>(gate.keep)) * splat<V>(gate.by);
  store(y, by_q * splat<V>(gate.keep) + delta * splat<V>(gate.qk));
  for (int64_t d = 0; d < k_dim; ++d)
    store(to + d * stride, load<V>(from + d * stride) * splat<V>(gate.keep) + delta * splat<V>(k[d]));
}

// y [dim] -> norm, weight, gate as Qwen3-Next's gated norm does.
template <Type T>
inline void norm_then_gate(const float* y, const char* norm, const char* z, char* out, int64_t dim, float eps) {
  const float factor = 1.0f / std::sqrt(dot(y, y, dim) / (float)dim + eps);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t here = std::min<int64_t>(kLanes, dim - i);
    vf gate{};
    for (int64_t j = 0; j < here; ++j) gate[j] = at<T>(z, i + j);
    gate = silu(gate);
    for (int64_t j = 0; j < here; ++j)
      put<T>(out, i + j, rounded<T>(at<T>(norm, i + j) * rounded<T>(y[i + j] * factor)) * gate[j]);
  }
}

// One step's gates: e^g and beta of a head, by its numbers in the row.
template <Type T>
inline Gate delta_gate(const DeltaStepArgs& a, const char* x, int64_t head, float qk) {
  const float b = at<T>(x, a.places[a.heads + head]), input = at<T>(x, a.places[2 * a.heads + head]);
  return {std::exp(a.decay[head] * softplus(input + a.dt_bias[head])), rounded<T>(1.0f / (1.0f + std::exp(-b))), qk};
}

// q and k of one head [k_dim] to length 1, q times k_dim^-1/2, too. Returns their product.
inline float delta_lengths(const float* q_in, const float* k_in, float* q, float* k, int64_t k_dim) {
  const float q_by = 1.0f / std::sqrt(dot(q_in, q_in, k_dim) + 1e-6f) / std::sqrt((float)k_dim);
  const float k_by = 1.0f / std::sqrt(dot(k_in, k_in, k_dim) + 1e-6f);
  for (int64_t d = 0; d < k_dim; ++d) q[d] = q_in[d] * q_by, k[d] = k_in[d] * k_by;
  return dot(q, k, k_dim);
}

template <Type T>
inline void delta_head(const DeltaStepArgs& a, const float* inputs, int64_t row, int64_t head) {
  const StepRows& s = a.step;
  const int64_t group = head / (a.heads / a.k_heads), size = a.k_dim * a.v_dim;
  const float *q_in = inputs + group * a.k_dim, *k_in = q_in + a.k_heads * a.k_dim;
  const float* v = inputs + 2 * a.k_heads * a.k_dim + head * a.v_dim;
  float *k = thread_scratch(2 * a.k_dim + a.v_dim), *q = k + a.k_dim, *y = q + a.k_dim;
  const char* x = s.rows + row * s.stride * size_of(T);
  const Gate gate = delta_gate<T>(a, x, head, delta_lengths(q_in, k_in, q, k, a.k_dim));
  const float* from = a.states + (s.read[row] * a.heads + head) * size;
  float* to = a.states + (s.write[row] * a.heads + head) * size;
  int64_t i = 0;
  for (; i + kLanes <= a.v_dim; i += kLanes)
    delta_columns<vf>(from + i, to + i, a.v_dim, q, k, gate, v + i, y + i, a.k_dim);
  for (; i < a.v_dim; ++i)
    delta_columns<float>(from + i, to + i, a.v_dim, q, k, gate, v + i, y + i, a.k_dim);
  for (i = 0; i < a.v_dim; ++i) y[i] = rounded<T>(y[i]);
  char* out = s.out + (row * a.heads + head) * a.v_dim * size_of(T);
  norm_then_gate<T>(y, a.norm, x + a.places[head] * size_of(T), out, a.v_dim, a.eps);
}

template <Type T>
inline void delta_prompts(const DeltaStepArgs& a) {
  const StepRows& s = a.step;
  const int64_t width = a.conv.channels, inner = a.heads * a.v_dim, most = most_rows(s), keys = a.k_heads * a.k_dim;
  const int64_t size = a.k_dim * a.v_dim, share = a.heads / a.k_heads;
  float *inputs = call_scratch(most * (width + inner + 3 * a.heads)), *y = inputs + most * width;
  Gate* gates = reinterpret_cast<Gate*>(y + most * inner);
  for_each_round(s, [&](const std::vector<Piece>& pieces, int64_t rows) {
    convolve_pieces<T>(s, a.conv, pieces, inputs);
    for_each_row(pieces, rows, [&](const Piece&, int64_t row, int64_t at_row) {
      float* q = inputs + at_row * width;
      for (int64_t group = 0; group < a.k_heads; ++group, q += a.k_dim) {
        const float qk = delta_lengths(q, q + keys, q, q + keys, a.k_dim);
        for (int64_t head = group * share; head < (group + 1) * share; ++head)
          gates[at_row * a.heads + head] = delta_gate<T>(a, s.rows + row * s.stride * size_of(T), head, qk);
      }
    });
    for_each_block(pieces, a.heads, a.v_dim, [&](const Piece& piece, int64_t head, int64_t first, int64_t columns) {
      const float* q = inputs + piece.at * width + head / share * a.k_dim;
      const Scan block{q + keys, q, inputs + piece.at * width + 2 * keys + head * a.v_dim + first,
                       gates + piece.at * a.heads + head, width, a.heads, a.k_dim, columns, false, a.v_dim};
      const auto place = [&](int64_t slot) {
        return slot < 0 ? nullptr : a.states + (slot * a.heads + head) * size + first;
      };
      scan<true>(
          block, piece.count, place(piece.from), place(piece.carry),
          [&](int64_t t) { return place(s.write[piece.row + t]); },
          [&](int64_t t, const vf*, vf* found) {
            for (int j = 0; j < kVectors; ++j) found[j] = norm_detail::rounded<T>(found[j]);
            __builtin_memcpy(y + (piece.at + t) * inner + head * a.v_dim + first, found, (size_t)(4 * columns));
          });
    });
    for_each_row(pieces, rows, [&](const Piece&, int64_t row, int64_t at_row) {
      const char* x = s.rows + row * s.stride * size_of(T);
      for (int64_t head = 0; head < a.heads; ++head)
        norm_then_gate<T>(y + at_row * inner + head * a.v_dim, a.norm, x + a.places[head] * size_of(T),
                          s.out + (row * inner + head * a.v_dim) * size_of(T), a.v_dim, a.eps);
    });
  });
}

template <Type T>
inline void delta_typed(const DeltaStepArgs& a) {
  if (!a.step.decode) return delta_prompts<T>(a);
  float* inputs = call_scratch(a.step.count * a.conv.channels);
  convolve_rows<T>(a.step, a.conv, inputs);
  parallel_for(a.step.count * a.heads, [&](int64_t item) {
    const int64_t row = item / a.heads;
    delta_head<T>(a, inputs + row * a.conv.channels, row, item % a.heads);
  });
}

template <Type T>
inline float ssd_dt(const SsdStepArgs& a, int64_t row, int64_t head) {
  const float raw = at<T>(a.step.rows + row * a.step.stride * size_of(T), a.dt_place + head);
  return rounded<T>(softplus(rounded<T>(raw + a.dt_bias[head])));
}

// One head: y [dim], rounded.
template <Type T>
inline void ssd_head(const SsdStepArgs& a, const float* inputs, int64_t row, int64_t head, float* y) {
  const StepRows& s = a.step;
  const int64_t group = head / (a.heads / a.groups);
  const float* x = inputs + head * a.dim;
  const float *b = inputs + a.heads * a.dim + group * a.size, *c = b + a.groups * a.size;
  const float dt = ssd_dt<T>(a, row, head), keep = std::exp(dt * a.a[head]);
  const float* from = a.states + (s.read[row] * a.heads + head) * a.dim * a.size;
  float* to = a.states + (s.write[row] * a.heads + head) * a.dim * a.size;
  for (int64_t p = 0; p < a.dim; ++p, from += a.size, to += a.size) {
    const float added = dt * x[p];
    vf sum{};
    int64_t n = 0;
    for (; n + kLanes <= a.size; n += kLanes) {
      const vf state = load<vf>(from + n) * splat(keep) + load<vf>(b + n) * splat(added);
      store(to + n, state);
      sum += state * load<vf>(c + n);
    }
    float found = hsum(sum);
    for (; n < a.size; ++n) {
      to[n] = from[n] * keep + b[n] * added;
      found += to[n] * c[n];
    }
    y[p] = rounded<T>(rounded<T>(found) + rounded<T>(x[p] * a.d[head]));
  }
}

// y [heads * dim] of one row, gated and, where there is a norm, normed.
template <Type T>
inline void finish_row(const SsdStepArgs& a, int64_t row, const float* y) {
  const StepRows& s = a.step;
  const int64_t dim = a.heads * a.dim, share = dim / a.norm_groups;
  const char* z = s.rows + (row * s.stride + a.z_place) * size_of(T);
  char* out = s.out + row * dim * size_of(T);
  float* gated = thread_scratch(2 * dim);
  float* gate = gated + dim;
  for (int64_t i = 0; i < dim; ++i) gate[i] = at<T>(z, i);
  for (int64_t i = 0; i < dim; i += kLanes) {
    vf v{};
    const int64_t here = std::min<int64_t>(kLanes, dim - i);
    __builtin_memcpy(&v, gate + i, (size_t)(4 * here));
    v = silu(v);
    __builtin_memcpy(gate + i, &v, (size_t)(4 * here));
  }
  if (a.norm == nullptr) {
    for (int64_t i = 0; i < dim; ++i) put<T>(out, i, y[i] * rounded<T>(gate[i]));
    return;
  }
  for (int64_t i = 0; i < dim; ++i) gated[i] = a.norm_before_gate ? y[i] : y[i] * gate[i];
  for (int64_t g = 0; g < a.norm_groups; ++g) {
    const float* own = gated + g * share;
    const float factor = 1.0f / std::sqrt(dot(own, own, share) / (float)share + a.eps);
    for (int64_t i = g * share; i < (g + 1) * share; ++i) {
      const float normed = at<T>(a.norm, i) * (gated[i] * factor);
      put<T>(out, i, a.norm_before_gate ? normed * gate[i] : normed);
    }
  }
}

template <Type T>
inline void ssd_prompts(const SsdStepArgs& a) {
  const StepRows& s = a.step;
  const int64_t width = a.conv.channels, inner = a.heads * a.dim, most = most_rows(s), keys = a.groups * a.size;
  const int64_t share = a.heads / a.groups;
  float *inputs = call_scratch(most * (width + inner + 3 * a.heads)), *y = inputs + most * width;
  Gate* gates = reinterpret_cast<Gate*>(y + most * inner);
  for_each_round(s, [&](const std::vector<Piece>& pieces, int64_t rows) {
    convolve_pieces<T>(s, a.conv, pieces, inputs);
    for_each_row(pieces, rows, [&](const Piece& piece, int64_t row, int64_t at_row) {
      const float* b = inputs + at_row * width + inner;
      for (int64_t group = 0; group < a.groups; ++group, b += a.size) {
        const float product = dot(b, b + keys, a.size);
        for (int64_t head = group * share; head < (group + 1) * share; ++head) {
          float dt = ssd_dt<T>(a, row, head);
          if (row - piece.row < piece.limited) dt = std::min(std::max(dt, a.dt_least), a.dt_most);
          gates[at_row * a.heads + head] = {std::exp(dt * a.a[head]), dt, product};
        }
      }
    });
    for_each_block(pieces, a.heads, a.dim, [&](const Piece& piece, int64_t head, int64_t first, int64_t columns) {
      const float *row = inputs + piece.at * width, *b = row + inner + head / share * a.size;
      const Scan block{b, b + keys, row + head * a.dim + first, gates + piece.at * a.heads + head,
                       width, a.heads, a.size, columns, true, a.size};
      const auto place = [&](int64_t slot) {
        return slot < 0 ? nullptr : a.states + ((slot * a.heads + head) * a.dim + first) * a.size;
      };
      scan<false>(
          block, piece.count, place(piece.from), place(piece.carry),
          [&](int64_t t) { return place(s.write[piece.row + t]); },
          [&](int64_t t, const vf* x, vf* found) {
            for (int j = 0; j < kVectors; ++j) found[j] = norm_detail::rounded<T>(found[j] + x[j] * splat(a.d[head]));
            __builtin_memcpy(y + (piece.at + t) * inner + head * a.dim + first, found, (size_t)(4 * columns));
          });
    });
    for_each_row(pieces, rows,
                 [&](const Piece&, int64_t row, int64_t at_row) { finish_row<T>(a, row, y + at_row * inner); });
  });
}

template <Type T>
inline void ssd_typed(const SsdStepArgs& a) {
  if (!a.step.decode) return ssd_prompts<T>(a);
  const int64_t dim = a.heads * a.dim;
  float* inputs = call_scratch(a.step.count * (a.conv.channels + dim));
  float* y = inputs + a.step.count * a.conv.channels;
  convolve_rows<T>(a.step, a.conv, inputs);
  parallel_for(a.step.count * a.heads, [&](int64_t item) {
    const int64_t row = item / a.heads, head = item % a.heads;
    ssd_head<T>(a, inputs + row * a.conv.channels, row, head, y + row * dim + head * a.dim);
  });
  parallel_for(a.step.count, [&](int64_t row) { finish_row<T>(a, row, y + row * dim); });
}

constexpr int64_t kPiece = 256;  // channels of a work item

template <Type T>
inline void short_conv_prompts(const ShortConvArgs& a) {
  const StepRows& s = a.step;
  const int64_t size = size_of(T), runs = (a.conv.channels + kPiece - 1) / kPiece;
  for_each_round(s, [&](const std::vector<Piece>& pieces, int64_t) {
    parallel_for((int64_t)pieces.size() * runs, [&](int64_t item) {
      const Piece& piece = pieces[(size_t)(item / runs)];
      const int64_t first = item % runs * kPiece, count = std::min(kPiece, a.conv.channels - first);
      const char* x = s.rows + (piece.row * s.stride + first) * size;
      char* out = s.out + (piece.row * a.conv.channels + first) * size;
      convolve_piece<T>(
          s, a.conv, piece, first, count,
          [&](int64_t t, float* to) {
            const char* row = x + t * s.stride * size;
            for (int64_t i = 0; i < count; ++i)
              to[i] = rounded<T>(at<T>(row, a.b_place + i) * at<T>(row, a.x_place + i));
          },
          [&](int64_t t, const float* y) {
            for (int64_t i = 0; i < count; ++i)
              put<T>(out + t * a.conv.channels * size, i, at<T>(x + t * s.stride * size, a.c_place + i) * rounded<T>(y[i]));
          });
    });
  });
}

template <Type T>
inline void short_conv_typed(const ShortConvArgs& a) {
  if (!a.step.decode) return short_conv_prompts<T>(a);
  const StepRows& s = a.step;
  const ConvStep& c = a.conv;
  const int64_t size = size_of(T), pieces = (c.channels + kPiece - 1) / kPiece, slot_bytes = c.channels * c.kept * size;
  parallel_for(s.count * pieces, [&](int64_t item) {
    const int64_t row = item / pieces, first = item % pieces * kPiece, count = std::min(kPiece, c.channels - first);
    const char* x = s.rows + (row * s.stride + first) * size;
    char* out = s.out + (row * c.channels + first) * size;
    char gated[kPiece * 4];
    float y[kPiece];
    for (int64_t i = 0; i < count; ++i) put<T>(gated, i, at<T>(x, a.b_place + i) * at<T>(x, a.x_place + i));
    convolve<T, 0>(c, gated, c.states + s.read[row] * slot_bytes, c.states + s.write[row] * slot_bytes, first, count, y);
    for (int64_t i = 0; i < count; ++i) put<T>(out, i, at<T>(x, a.c_place + i) * rounded<T>(y[i]));
  });
}

template <Type T>
inline void silu_conv_typed(const SiluConvArgs& a) {
  const StepRows& s = a.step;
  const int64_t channels = a.conv.channels;
  float* y = call_scratch((s.decode ? s.count : most_rows(s)) * channels);
  const auto put_row = [&](int64_t row, int64_t at_row) {
    for (int64_t i = 0; i < channels; ++i) put<T>(s.out + row * channels * size_of(T), i, y[at_row * channels + i]);
  };
  if (s.decode) {
    convolve_rows<T>(s, a.conv, y);
    parallel_for(s.count, [&](int64_t row) { put_row(row, row); });
    return;
  }
  for_each_round(s, [&](const std::vector<Piece>& pieces, int64_t rows) {
    convolve_pieces<T>(s, a.conv, pieces, y);
    for_each_row(pieces, rows, [&](const Piece&, int64_t row, int64_t at_row) { put_row(row, at_row); });
  });
}

}  // namespace kvreclaim::KVR_NS::recurrent_detail

namespace kvreclaim::KVR_NS {

// Defined once per instruction set, by src/recurrent.cpp.
void delta_step(const DeltaStepArgs& a) {
  a.step.type == Type::kBF16 ? recurrent_detail::delta_typed<Type::kBF16>(a)
                             : recurrent_detail::delta_typed<Type::kF32>(a);
}

void ssd_step(const SsdStepArgs& a) {
  a.step.type == Type::kBF16 ? recurrent_detail::ssd_typed<Type::kBF16>(a)
                             : recurrent_detail::ssd_typed<Type::kF32>(a);
}

void short_conv_step(const ShortConvArgs& a) {
  a.step.type == Type::kBF16 ? recurrent_detail::short_conv_typed<Type::kBF16>(a)
                             : recurrent_detail::short_conv_typed<Type::kF32>(a);
}

void silu_conv_step(const SiluConvArgs& a) {
  a.step.type == Type::kBF16 ? recurrent_detail::silu_conv_typed<Type::kBF16>(a)
                             : recurrent_detail::silu_conv_typed<Type::kF32>(a);
}

void selective_scan(const SelectiveScanArgs& a) {
  a.step.type == Type::kBF16 ? recurrent_detail::selective_typed<Type::kBF16>(a)
                             : recurrent_detail::selective_typed<Type::kF32>(a);
}

}  // namespace kvreclaim::KVR_NS
