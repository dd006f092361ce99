// What lies between the products of a decoder layer: rotary embedding (with norms of heads), SiLU(gate) * up, and the
// residual sum. Results are rounded to the type of the tensors wherever the modules of Llama and its relatives do.
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

// rows [T, stride]: queries of `heads` heads of `dim` numbers, behind them the keys of `kv_heads`; changed in place.
// cos, sin [T, turned], contiguous: of number i and of i + turned / 2, which turn with each other. Norm weights
// [dim] or null: RMS norm of each head before. All of one type.
struct RotateArgs {
  char* rows;
  const char *cos, *sin, *q_norm, *k_norm;
  int64_t count, stride, heads, kv_heads, dim, turned;
  float eps;
  Type type;
};

// x [T, 2 * dim] -> y [T, dim]: SiLU of the first half times the second, both contiguous.
struct GateArgs {
  const char* x;
  char* y;
  int64_t count, dim;
  Type type;
};

// y += x, `count` numbers each.
struct AddArgs {
  const char* x;
  char* y;
  int64_t count;
  Type type;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/norm.h"

namespace kvreclaim::KVR_NS::decoder_detail {

using norm_detail::kStepBytes;
using norm_detail::narrow;
using norm_detail::Pair;
using norm_detail::rounded;
using norm_detail::widen;

constexpr int64_t kItemBytes = 32 * 1024;  // a smaller share is not worth a thread

// body(at, bytes) for pieces of `bytes` bytes of kStepBytes, the last one shorter.
template <Type T, class Body>
KVR_INLINE void for_each_step(int64_t bytes, const Body& body) {
  int64_t at = 0;
  for (; at + kStepBytes<T> <= bytes; at += kStepBytes<T>) body(at, kStepBytes<T>);
  if (at < bytes) body(at, bytes - at);
}

template <Type T>
KVR_INLINE Pair read(const char* p, int64_t bytes) {
  if (bytes == kStepBytes<T>) return widen<T>(p);
  char whole[kStepBytes<T>] = {};
  __builtin_memcpy(whole, p, (size_t)bytes);
  return widen<T>(whole);
}

template <Type T>
KVR_INLINE void write(char* p, Pair x, int64_t bytes) {
  if (bytes == kStepBytes<T>) return narrow<T>(p, x);
  char whole[kStepBytes<T>];
  narrow<T>(whole, x);
  __builtin_memcpy(p, whole, (size_t)bytes);
}

template <Type T>
KVR_INLINE vf turn(vf x, vf cos, vf other, vf sin) {
  return rounded<T>(x * cos) + rounded<T>(other * sin);
}

template <Type T>
inline void rotate_head(const RotateArgs& a, char* head, const char* norm, const char* cos, const char* sin) {
  if (norm != nullptr) norm_detail::norm_row<T>({head, norm, head, 1, a.dim, a.eps, T}, 0);
  const int64_t half = a.turned / 2 * size_of(T);
  for_each_step<T>(half, [&](int64_t at, int64_t bytes) {
    const Pair x = read<T>(head + at, bytes), y = read<T>(head + half + at, bytes);
    const Pair c = read<T>(cos + at, bytes), s = read<T>(sin + at, bytes);
    const Pair d = read<T>(cos + half + at, bytes), t = read<T>(sin + half + at, bytes);
    write<T>(head + at, {turn<T>(x.a, c.a, -y.a, s.a), turn<T>(x.b, c.b, -y.b, s.b)}, bytes);
    write<T>(head + half + at, {turn<T>(y.a, d.a, x.a, t.a), turn<T>(y.b, d.b, x.b, t.b)}, bytes);
  });
}

template <Type T>
inline void rotate_typed(const RotateArgs& a) {
  const int64_t size = size_of(T), heads = a.heads + a.kv_heads;
  const int64_t share = std::max<int64_t>(1, kItemBytes / std::max<int64_t>(1, heads * a.dim * size));
  parallel_for((a.count + share - 1) / share, [&](int64_t item) {
    for (int64_t t = item * share; t < std::min((item + 1) * share, a.count); ++t)
      for (int64_t h = 0; h < heads; ++h)
        rotate_head<T>(a, a.rows + (t * a.stride + h * a.dim) * size, h < a.heads ? a.q_norm : a.k_norm,
                       a.cos + t * a.turned * size, a.sin + t * a.turned * size);
  });
}

KVR_INLINE vf silu(vf x) { return x / (splat(1.0f) + expv(vmin(-x, splat(88.0f)))); }

template <Type T>
inline void gate_typed(const GateArgs& a) {
  const int64_t bytes = a.dim * size_of(T);
  const int64_t share = std::max<int64_t>(1, kItemBytes / std::max<int64_t>(1, bytes));
  parallel_for((a.count + share - 1) / share, [&](int64_t item) {
    for (int64_t t = item * share; t < std::min((item + 1) * share, a.count); ++t)
      for_each_step<T>(bytes, [&](int64_t at, int64_t step) {
        const Pair gate = read<T>(a.x + 2 * t * bytes + at, step), up = read<T>(a.x + (2 * t + 1) * bytes + at, step);
        write<T>(a.y + t * bytes + at, {rounded<T>(silu(gate.a)) * up.a, rounded<T>(silu(gate.b)) * up.b}, step);
      });
  });
}

template <Type T>
inline void add_typed(const AddArgs& a) {
  const int64_t bytes = a.count * size_of(T);
  parallel_for((bytes + kItemBytes - 1) / kItemBytes, [&](int64_t item) {
    const int64_t first = item * kItemBytes;
    for_each_step<T>(std::min(kItemBytes, bytes - first), [&](int64_t at, int64_t step) {
      const Pair x = read<T>(a.x + first + at, step), y = read<T>(a.y + first + at, step);
      write<T>(a.y + first + at, {x.a + y.a, x.b + y.b}, step);
    });
  });
}

}  // namespace kvreclaim::KVR_NS::decoder_detail

namespace kvreclaim::KVR_NS {

inline void rotate_heads(const RotateArgs& a) {
  a.type == Type::kBF16 ? decoder_detail::rotate_typed<Type::kBF16>(a) : decoder_detail::rotate_typed<Type::kF32>(a);
}

inline void gate_rows(const GateArgs& a) {
  a.type == Type::kBF16 ? decoder_detail::gate_typed<Type::kBF16>(a) : decoder_detail::gate_typed<Type::kF32>(a);
}

inline void add_rows(const AddArgs& a) {
  a.type == Type::kBF16 ? decoder_detail::add_typed<Type::kBF16>(a) : decoder_detail::add_typed<Type::kF32>(a);
}

}  // namespace kvreclaim::KVR_NS
#endif
