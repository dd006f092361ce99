// Arguments of the recurrent layers: tokens of several sequences, packed. A sequence's state is read from one slot; what
// it becomes behind a token is written where that token's slot says. No slot may be read and written by the same call.
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

constexpr int64_t kMostWidth = 16;  // of a convolution

// Rows of numbers, one for each token; sequence n has rows starts[n] to starts[n + 1], at least one.
struct StepRows {
  const char* rows;  // [T, stride]
  char* out;         // [T, heads * size of a head], contiguous
  const int64_t *starts, *read, *write;  // [N + 1]; [N] slots, -1: it begins; [T] slots, -1: not kept, never at an end
  int64_t count, tokens, stride;
  Type type;    // of rows, out, convolution and norm
  bool decode;  // one token of each, and all are behind a state
};

// A causal convolution of each channel, then SiLU: channel c's newest input is in the row, those before in its state.
struct ConvStep {
  const int64_t* pieces;  // [num_pieces, 3]: place in the row, first channel, number of channels
  const char *weight, *bias;  // [channels, width], [channels] or null
  char* states;               // [slots, channels, kept], the newest last; kept >= width - 1
  int64_t num_pieces, channels, width, kept;
};

// Gated delta rule: S' = e^g S + k (beta (v - e^g S^T k))^T, y = S'^T q, then norm of each head, times SiLU(z).
// Channels of the convolution: q, k [k_heads, k_dim] each, v [heads, v_dim]. q and k are scaled to length 1, q by
// k_dim^-1/2, too. beta = sigmoid(b); g = decay * softplus(a + dt_bias).
struct DeltaStepArgs {
  StepRows step;
  ConvStep conv;
  float* states;                // [slots, heads, k_dim, v_dim]
  const int64_t* places;        // [3, heads]: of each head's z, b and a in a row
  const float *decay, *dt_bias;  // [heads]
  const char* norm;             // [v_dim]
  int64_t heads, k_heads, k_dim, v_dim;
  float eps;
};

// Mamba-2: S' = e^(dt A) S + (dt x) B^T, y = S' C + D x; dt = softplus(dt + dt_bias). Then y SiLU(z), with an RMS norm
// of each of norm_groups before or behind the gate. Channels of the convolution: x [heads, dim], B, C [groups, size].
struct SsdStepArgs {
  StepRows step;
  ConvStep conv;
  float* states;                   // [slots, heads, dim, size]
  const float *a, *d, *dt_bias;    // [heads]
  const char* norm;                // [heads * dim] or null
  int64_t heads, dim, groups, size, norm_groups, z_place, dt_place;
  float eps, dt_least, dt_most;  // transformers keeps the dt of prompts, not of decoded tokens, between these
  bool norm_before_gate;
};

// A convolution between two gates: y = C * conv(B * x), without SiLU; B, C and x of a row, [channels] each, begin at
// these places. conv.pieces are not used.
struct ShortConvArgs {
  StepRows step;
  ConvStep conv;
  int64_t b_place, c_place, x_place;
};

// The convolution alone: y [T, channels] = SiLU(conv(x)).
struct SiluConvArgs {
  StepRows step;
  ConvStep conv;
};

// Mamba-1: each channel's S' = e^(dt A) S + dt x B, y = (S' C + D x) SiLU(z); dt = softplus of what is given. step.rows
// are x [T, channels]. With norms B and C pass an RMS norm each before.
struct SelectiveScanArgs {
  StepRows step;
  const char *dt, *z, *bc;  // [T, channels], [T, channels], [T, 2 * size], rows so many numbers apart:
  int64_t dt_stride, z_stride, bc_stride;
  float* states;                // [slots, channels, size]
  const float *a, *d;           // [size, channels], times log2(e); [channels]
  const char *b_norm, *c_norm;  // [size] or null
  int64_t channels, size;
  float eps;
};

}  // namespace kvreclaim
