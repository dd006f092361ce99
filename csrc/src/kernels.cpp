// The kernels of one instruction set but those of attention.cpp and recurrent.cpp, and the table of all. Compiled once
// per set with KVR_NS = baseline, avx2, avx512 or avx512vnni and the matching compiler flags.
#include "kvreclaim/table.h"

namespace kvreclaim::KVR_NS {

void paged_attention(const AttentionArgs&);
void column_sums(const ColumnSumsArgs&);
void delta_step(const DeltaStepArgs&);
void ssd_step(const SsdStepArgs&);
void short_conv_step(const ShortConvArgs&);
void silu_conv_step(const SiluConvArgs&);
void selective_scan(const SelectiveScanArgs&);

#define KVR_STRING_(x) #x
#define KVR_STRING(x) KVR_STRING_(x)

extern const KernelTable kTable;
const KernelTable kTable = {
    KVR_STRING(KVR_NS), kLanes,
#define KVR_ENTRY(name, Args) name,
    KVR_KERNELS(KVR_ENTRY)
#undef KVR_ENTRY
};

}  // namespace kvreclaim::KVR_NS
