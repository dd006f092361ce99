// Picks the kernels' instruction set once, at the first use.
#include <cstdlib>
#include <cstring>
#include <string>

#include "kvreclaim/table.h"
#ifdef KVR_X86
#include "cpu.h"
#endif

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

struct Tables {
  const KernelTable* tables[7] = {};
  const char* names[7] = {};
  int count = 0;

  void add(const KernelTable& table) {
    if (table.isa == nullptr) return;  // absent.cpp
    tables[count] = &table;
    names[count++] = table.isa;
  }

  Tables() {
#ifdef KVR_X86
    const Cpu cpu;
    if (cpu.amx) add(amx::kTable);
    if (cpu.bf16) add(avx512bf16::kTable);
    if (cpu.vnni) add(avx512vnni::kTable);
    if (cpu.avx512) add(avx512::kTable);
    if (cpu.avx2) add(avx2::kTable);
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

const char* compiled_isas() {
  static const std::string names = [] {
    std::string text = "baseline";
#ifdef KVR_X86
    for (const KernelTable* table :
         {&avx2::kTable, &avx512::kTable, &avx512vnni::kTable, &avx512bf16::kTable, &amx::kTable})
      if (table->isa != nullptr) text += std::string(" ") + table->isa;
#endif
    return text;
  }();
  return names.c_str();
}

bool set_isa(const char* name) {
  const KernelTable* table = all().find(name);
  if (table != nullptr) chosen() = table;
  return table != nullptr;
}

}  // namespace kvreclaim
