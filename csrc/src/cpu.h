// What this CPU has and this system lets programs use. Read from the CPU itself: not every compiler's runtime knows.
#pragma once

#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvreclaim {

class Cpu {
 public:
  Cpu() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned fma = 1u << 12, saves = 1u << 27, avx = 1u << 28, half = 1u << 29;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, saves | avx)) return;
    constexpr unsigned ymm = 0x6, zmm = 0xe6;
    const unsigned saved = saved_registers(), first = c;
    if (!has(saved, ymm) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned highest = a;
    constexpr unsigned two = 1u << 5, f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    constexpr unsigned dot = 1u << 11, bf16_tiles = 1u << 22, tiles = 1u << 24;
    avx2 = has(first, fma | half) && has(b, two);
    avx512 = avx2 && has(saved, zmm) && has(b, f | dq | bw | vl);
    vnni = avx512 && has(c, dot);
    const bool may_use_tiles = has(d, bf16_tiles | tiles);
    constexpr unsigned pairs = 1u << 5;
    bf16 = vnni && highest >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, pairs);
    amx = bf16 && may_use_tiles && tiles_granted();
  }

  bool avx2 = false;    // with FMA and half precision
  bool avx512 = false;  // F, BW, VL and DQ
  bool vnni = false, bf16 = false, amx = false;

 private:
  static bool has(unsigned word, unsigned bits) { return (word & bits) == bits; }

  // XCR0: which registers the system keeps for a thread.
  static unsigned saved_registers() {
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
  }

  // Linux lets a process use the registers of matrix tiles once it has requested them.
  static bool tiles_granted() {
#ifdef __linux__
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
  }
};

}  // namespace kvreclaim
