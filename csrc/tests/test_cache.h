// A cache of any format with its own bytes, read by the definition in layout.h and in doubles.
#pragma once

#include "harness.h"

namespace kvreclaim::tests {

constexpr Formats kCoded[] = {Format::kFP8, Format::kInt8, Format::kInt4, Format::kTurbo4,
                              {Format::kInt8, Format::kInt4}};

// Plain: full of NaN. Coded: random bytes, one byte off any alignment. Nothing lies behind the last byte.
struct TestCache {
  Numbers k, v;
  std::vector<char> units;
  std::vector<float> k_signs, v_signs;
  CacheView view;

  TestCache(Formats formats, int64_t layers, int64_t blocks, int64_t heads, int64_t size, int64_t k_dim,
            int64_t v_dim, bool latent = false)
      : k(type_of(formats.k), is_plain(formats) ? layers * blocks * heads * size * k_dim : 0),
        v(type_of(formats.v), is_plain(formats) ? layers * blocks * heads * size * v_dim : 0),
        view{} {
    view.layers = layers, view.blocks = blocks, view.heads = heads, view.block_size = size;
    view.k_dim = k_dim, view.v_dim = v_dim, view.formats = formats, view.latent = latent;
    if (is_plain(formats)) {
      view.k = k.data(), view.v = v.data();
      view.k_stride = size * k_dim * size_of(formats.k), view.v_stride = size * v_dim * size_of(formats.v);
      return;
    }
    Random random(k_dim + v_dim);
    units.resize(1 + layers * blocks * heads * unit_bytes(view));
    for (char& byte : units) byte = (char)random.bits();
    view.data = units.data() + 1;
    for (int64_t d = 0; d < k_dim; ++d) k_signs.push_back(random.below(2) ? 1.0f : -1.0f);
    for (int64_t d = 0; d < v_dim; ++d) v_signs.push_back(random.below(2) ? 1.0f : -1.0f);
    view.k_signs = k_signs.data(), view.v_signs = v_signs.data();
  }
  TestCache(Type type, int64_t layers, int64_t blocks, int64_t heads, int64_t size, int64_t k_dim, int64_t v_dim)
      : TestCache(Formats((Format)type), layers, blocks, heads, size, k_dim, v_dim) {}
  TestCache(const TestCache&) = delete;

  // The stored numbers; of a key also the dims that it shares with the value.
  double key(int64_t layer, int64_t block, int64_t head, int64_t s, int64_t d) const {
    if (!view.latent) return stored(true, layer, block, head, s, d);
    return d < view.v_dim ? value(layer, block, head, s, d) : stored(true, layer, block, head, s, d - view.v_dim);
  }
  double value(int64_t layer, int64_t block, int64_t head, int64_t s, int64_t d) const {
    return stored(false, layer, block, head, s, d);
  }

  int64_t k_index(int64_t layer, int64_t block, int64_t head, int64_t s, int64_t d) const {
    const int64_t size = view.block_size, unit = (layer * view.blocks + block) * view.heads + head;
    return unit * size * view.k_dim + (view.formats.k == Format::kF32 ? d * size + s : ((d / 2) * size + s) * 2 + d % 2);
  }
  int64_t v_index(int64_t layer, int64_t block, int64_t head, int64_t s, int64_t d) const {
    return (((layer * view.blocks + block) * view.heads + head) * view.block_size + s) * view.v_dim + d;
  }

 private:
  static Type type_of(Format format) { return is_plain(format) ? (Type)format : Type::kF32; }

  Format format_of(bool key) const { return key ? view.formats.k : view.formats.v; }
  int64_t params_at() const { return k_code_bytes(view) + v_code_bytes(view); }
  const uint8_t* unit_at(int64_t layer, int64_t block, int64_t head) const {
    const int64_t index = (layer * view.blocks + block) * view.heads + head;
    return reinterpret_cast<const uint8_t*>(view.data) + index * unit_bytes(view);
  }

  int code(bool key, const uint8_t* unit, int64_t s, int64_t d) const {
    const int64_t bits = bits_of(format_of(key)), fields = 32 / bits;
    const int64_t word = key ? d / fields * view.block_size + s : s / fields * view.v_dim + d;
    uint32_t x;
    std::memcpy(&x, unit + (key ? 0 : k_code_bytes(view)) + 4 * word, 4);
    return (int)(x >> bits * ((key ? d : s) % fields) & ((1u << bits) - 1));
  }

  double fine_scale(bool key, const uint8_t* unit, int64_t s) const {
    const Format format = format_of(key);
    const uint8_t* planes = unit + params_at() + s;
    const int64_t last = view.formats.v == Format::kInt4 ? 1 + 2 * groups_of(view.v_dim) : 2;
    const int high = planes[last * view.block_size] >> (key ? 0 : 4) & 15;
    const int code = planes[(key ? 0 : 1) * view.block_size] | high << 8;
    if (code == 0 && format == Format::kTurbo4) return 0;
    return std::exp2(code / 256.0 - (format == Format::kInt8 ? 13 : format == Format::kFP8 ? 15 : 9));
  }

  static double level(int code) {
    constexpr double kHalf[] = {.1284, .388, .6568, .9423, 1.2562, 1.618, 2.069, 2.7326};
    return code < 8 ? -kHalf[7 - code] : kHalf[code - 8];
  }
  static double fp8(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = std::ldexp(exponent ? 8 + mantissa : mantissa, (exponent ? exponent : 1) - 10);
    return code & 128 ? -size : size;
  }
  static double thirds(int code, int centre, int scale) {
    return centre == 0 ? 0 : std::exp2(scale / 16.0 - 10) * (code - 7.5 + (centre - 128) / 3.0);
  }

  // Of a rotated format, before the rotation is undone.
  double turned(bool key, const uint8_t* unit, int64_t s, int64_t d) const {
    const int n = code(key, unit, s, d);
    if (format_of(key) == Format::kTurbo4) return level(n) * fine_scale(key, unit, s);
    const int64_t first = key ? 0 : view.formats.k == Format::kInt4 ? 2 * groups_of(view.k_dim) : 1;
    const uint8_t* planes = unit + params_at() + (first + d / kGroup * 2) * view.block_size + s;
    return thirds(n, planes[view.block_size], planes[0]);
  }

  double stored(bool key, int64_t layer, int64_t block, int64_t head, int64_t s, int64_t d) const {
    if (is_plain(view.formats))
      return key ? k.get(k_index(layer, block, head, s, d)) : v.get(v_index(layer, block, head, s, d));
    const uint8_t* unit = unit_at(layer, block, head);
    switch (format_of(key)) {
      case Format::kInt8: return (code(key, unit, s, d) - 128) * fine_scale(key, unit, s);
      case Format::kFP8: return fp8(code(key, unit, s, d)) * fine_scale(key, unit, s);
      default: break;
    }
    const int64_t dim = key ? view.k_dim : view.v_dim, width = dim & -dim, first = d / width * width;
    double sum = 0;
    for (int64_t e = 0; e < width; ++e)
      sum += (__builtin_popcountll(e & (d - first)) % 2 ? -1 : 1) * turned(key, unit, s, first + e);
    return sum / std::sqrt((double)width) * (key ? k_signs : v_signs)[d];
  }
};

}  // namespace kvreclaim::tests
