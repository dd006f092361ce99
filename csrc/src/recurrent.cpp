// Steps of recurrent layers for one instruction set, apart from the other kernels so that all compile side by side.
#include "kvreclaim/recurrent.h"
