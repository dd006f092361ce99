// Picks the kernels' instruction set once, at the first use.
#include <cstdlib>
#include <cstring>

#ifdef KVR_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kvreclaim/table.h"

namespace kvreclaim {

namespace baseline {
extern const KernelTable kTable;
}
#ifdef KVR_X86
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx512vnni {
extern const KernelTable kTable;
}
namespace avx512bf16 {
extern const KernelTable kTable;
}
namespace amx {
extern const KernelTable kTable;
}
#endif

namespace {

#ifdef KVR_X86
// Matrix tiles: the CPU has them, and Linux lets this process use their registers once it has asked to.
bool has_matrices() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned bf16_and_tiles = 1u << 22 | 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & bf16_and_tiles) != bf16_and_tiles) return false;
#ifdef __linux__
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

struct Tables {
  const KernelTable* tables[7] = {};
  const char* names[7] = {};
  int count = 0;

  void add(const KernelTable& table) {
    tables[count] = &table;
    names[count++] = table.isa;
  }

  Tables() {
#ifdef KVR_X86
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    const bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
    if (has_bf16 && has_matrices()) add(amx::kTable);
    if (has_bf16) add(avx512bf16::kTable);
    if (has_vnni) add(avx512vnni::kTable);
    if (has_avx512) add(avx512::kTable);
    if (has_avx2) add(avx2::kTable);
#endif
    add(baseline::kTable);
  }

  const KernelTable* find(const char* name) const {
    for (int i = 0; i < count; ++i)
      if (std::strcmp(names[i], name) == 0) return tables[i];
    return nullptr;
  }
};

const Tables& all() {
  static const Tables tables;
  return tables;
}

const KernelTable*& chosen() {
  static const KernelTable* table = all().tables[0];
  return table;
}

}  // namespace

const KernelTable& kernels() { return *chosen(); }

const char* const* supported_isas() { return all().names; }

bool set_isa(const char* name) {
  const KernelTable* table = all().find(name);
  if (table != nullptr) chosen() = table;
  return table != nullptr;
}

}  // namespace kvreclaim
