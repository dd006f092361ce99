// The kernels of one instruction set as a table of function pointers.
//
// How a kernel gets in:
//   1. its header declares `struct XxxArgs` in namespace kvreclaim (plain data, no vectors), and, under
//      #ifdef KVR_NS, `inline void xxx(const XxxArgs&)` in namespace kvreclaim::KVR_NS;
//   2. it is included below and named in KVR_KERNELS;
//   3. src/bind_*.cpp checks the arguments, fills XxxArgs and calls kernels().xxx(args).
#pragma once

#include "kvreclaim/attention_args.h"
#include "kvreclaim/compact.h"
#include "kvreclaim/decoder.h"
#include "kvreclaim/norm.h"
#include "kvreclaim/packed_tiles.h"
#include "kvreclaim/matrix_linear.h"
#include "kvreclaim/mixture.h"
#include "kvreclaim/recurrent_args.h"
#include "kvreclaim/scoring.h"
#include "kvreclaim/transform.h"
#include "kvreclaim/surrogate.h"
#include "kvreclaim/token_norms.h"
#include "kvreclaim/topk.h"
#include "kvreclaim/write.h"

#define KVR_KERNELS(X)              \
  X(paged_attention, AttentionArgs) \
  X(column_sums, ColumnSumsArgs)    \
  X(linear, LinearArgs)             \
  X(rms_norm, RmsNormArgs)          \
  X(rms_norm_from_one, RmsNormArgs) \
  X(rotate_heads, RotateArgs)       \
  X(gate_rows, GateArgs)            \
  X(add_rows, AddArgs)              \
  X(delta_step, DeltaStepArgs)      \
  X(ssd_step, SsdStepArgs)          \
  X(short_conv_step, ShortConvArgs) \
  X(silu_conv_step, SiluConvArgs)   \
  X(selective_scan, SelectiveScanArgs) \
  X(packed_linear, PackedArgs)      \
  X(unpack_rows, UnpackArgs)        \
  X(transform_rows, TransformArgs)  \
  X(write_kv, WriteArgs)            \
  X(gather_tokens, GatherArgs)      \
  X(trig_norm_scores, TrigArgs)     \
  X(token_norms, NormArgs)          \
  X(surrogate_scores, SurrogateArgs) \
  X(mixture_scores, MixtureArgs)    \
  X(select_top, SelectArgs)         \
  X(compact, CompactArgs)

namespace kvreclaim {

struct KernelTable {
  const char* isa;
  int lanes;
#define KVR_ENTRY(name, Args) void (*name)(const Args&);
  KVR_KERNELS(KVR_ENTRY)
#undef KVR_ENTRY
};

// The table of the best instruction set of this CPU, or of the one set_isa or $KVRECLAIM_ISA names.
const KernelTable& kernels();

// Names that this CPU can run, best first; the array ends with a null pointer.
const char* const* supported_isas();

// Names that were compiled, whatever this CPU runs, separated by spaces.
const char* compiled_isas();

// Makes kernels() return that table from now on; false if the CPU or the build lacks it.
bool set_isa(const char* name);

}  // namespace kvreclaim
