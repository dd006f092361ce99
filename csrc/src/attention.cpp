// Attention for one instruction set, apart from the other kernels so that both compile side by side.
#include "kvreclaim/attention.h"

#include "kvreclaim/column_sums.h"
