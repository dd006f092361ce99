// Picks the kernels' instruction set once, at the first use.
#include <cstdlib>
#include <cstring>

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
#endif

namespace {

struct Tables {
  const KernelTable* tables[5] = {};
  const char* names[5] = {};
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
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) add(avx512vnni::kTable);
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
