// The table of an instruction set that is left out: empty, and dispatch.cpp passes it over.
#include "kvreclaim/table.h"

namespace kvreclaim::KVR_NS {

extern const KernelTable kTable;
const KernelTable kTable = {};

}  // namespace kvreclaim::KVR_NS
