// One token of each of several sequences through the convolution and the state of a recurrent layer. Sums in fp32;
// results are rounded to the type of the rows where transformers' modules round. A row does not depend on the others.
#pragma once

#include <algorithm>
#include <cmath>

#include "kvreclaim/decoder.h"
#include "kvreclaim/memory.h"
#include "kvreclaim/recurrent_args.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::recurrent_detail {

using decoder_detail::silu;

template <Type T>
KVR_INLINE float at(const char* p, int64_t i) {
  if constexpr (T == Type::kF32) return load<float>(p + 4 * i);
  return from_bf16(load<uint16_t>(p + 2 * i));
}

template <Type T>
KVR_INLINE void put(char* p, int64_t i, float x) {
  if constexpr (T == Type::kF32)
    store(p + 4 * i, x);
  else
    store(p + 2 * i, to_bf16(x));
}

template <Type T>
KVR_INLINE float rounded(float x) {
  return T == Type::kF32 ? x : from_bf16(to_bf16(x));
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x -> SiLU(x), rounded before and after.
template <Type T>
inline void silu_row(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    vf v{};
    const int64_t here = std::min<int64_t>(kLanes, count - i);
    __builtin_memcpy(&v, x + i, (size_t)(4 * here));
    v = norm_detail::rounded<T>(silu(norm_detail::rounded<T>(v)));
    __builtin_memcpy(x + i, &v, (size_t)(4 * here));
  }
}

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

inline float dot(const float* x, const float* y, int64_t count) {
  vf sum{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += load<vf>(x + i) * load<vf>(y + i);
  float rest = hsum(sum);
  for (; i < count; ++i) rest += x[i] * y[i];
  return rest;
}

// Delta rule for the columns of one V: rows of the state are `stride` floats apart.
template <class V>
KVR_INLINE void delta_columns(const float* from, float* to, int64_t stride, const float* q, const float* k, float keep,
                              float beta, float qk, const float* v, float* y, int64_t k_dim) {
  V by_k{}, by_q{};
  for (int64_t d = 0; d < k_dim; ++d) {
    const V state = load<V>(from + d * stride);
    by_k += state * splat<V>(k[d]);
    by_q += state * splat<V>(q[d]);
  }
  const V delta = (load<V>(v) - by_k * splat<V>(keep)) * splat<V>(beta);
  store(y, by_q * splat<V>(keep) + delta * splat<V>(qk));
  for (int64_t d = 0; d < k_dim; ++d)
    store(to + d * stride, load<V>(from + d * stride) * splat<V>(keep) + delta * splat<V>(k[d]));
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

template <Type T>
inline void delta_head(const DeltaStepArgs& a, const float* inputs, int64_t row, int64_t head) {
  const StepRows& s = a.step;
  const int64_t group = head / (a.heads / a.k_heads), size = a.k_dim * a.v_dim;
  const float *q_in = inputs + group * a.k_dim, *k_in = q_in + a.k_heads * a.k_dim;
  const float* v = inputs + 2 * a.k_heads * a.k_dim + head * a.v_dim;
  float *k = thread_scratch(2 * a.k_dim + a.v_dim), *q = k + a.k_dim, *y = q + a.k_dim;
  const float q_by = 1.0f / std::sqrt(dot(q_in, q_in, a.k_dim) + 1e-6f) / std::sqrt((float)a.k_dim);
  const float k_by = 1.0f / std::sqrt(dot(k_in, k_in, a.k_dim) + 1e-6f);
  for (int64_t d = 0; d < a.k_dim; ++d) q[d] = q_in[d] * q_by, k[d] = k_in[d] * k_by;
  const char* x = s.rows + row * s.stride * size_of(T);
  const float b = at<T>(x, a.places[a.heads + head]), input = at<T>(x, a.places[2 * a.heads + head]);
  const float beta = rounded<T>(1.0f / (1.0f + std::exp(-b)));
  const float keep = std::exp(a.decay[head] * softplus(input + a.dt_bias[head])), qk = dot(q, k, a.k_dim);
  const float* from = a.states + (s.read[row] * a.heads + head) * size;
  float* to = a.states + (s.write[row] * a.heads + head) * size;
  int64_t i = 0;
  for (; i + kLanes <= a.v_dim; i += kLanes)
    delta_columns<vf>(from + i, to + i, a.v_dim, q, k, keep, beta, qk, v + i, y + i, a.k_dim);
  for (; i < a.v_dim; ++i)
    delta_columns<float>(from + i, to + i, a.v_dim, q, k, keep, beta, qk, v + i, y + i, a.k_dim);
  for (i = 0; i < a.v_dim; ++i) y[i] = rounded<T>(y[i]);
  char* out = s.out + (row * a.heads + head) * a.v_dim * size_of(T);
  norm_then_gate<T>(y, a.norm, x + a.places[head] * size_of(T), out, a.v_dim, a.eps);
}

template <Type T>
inline void delta_typed(const DeltaStepArgs& a) {
  float* inputs = call_scratch(a.step.count * a.conv.channels);
  convolve_rows<T>(a.step, a.conv, inputs);
  parallel_for(a.step.count * a.heads, [&](int64_t item) {
    const int64_t row = item / a.heads;
    delta_head<T>(a, inputs + row * a.conv.channels, row, item % a.heads);
  });
}

// One head: y [dim], rounded.
template <Type T>
inline void ssd_head(const SsdStepArgs& a, const float* inputs, int64_t row, int64_t head, float* y) {
  const StepRows& s = a.step;
  const int64_t group = head / (a.heads / a.groups);
  const float* x = inputs + head * a.dim;
  const float *b = inputs + a.heads * a.dim + group * a.size, *c = b + a.groups * a.size;
  const float raw = at<T>(s.rows + row * s.stride * size_of(T), a.dt_place + head);
  const float dt = rounded<T>(softplus(rounded<T>(raw + a.dt_bias[head]))), keep = std::exp(dt * a.a[head]);
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
inline void ssd_typed(const SsdStepArgs& a) {
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
inline void short_conv_typed(const ShortConvArgs& a) {
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

}  // namespace kvreclaim::KVR_NS
