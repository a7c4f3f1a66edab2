// Normalised recurrent layers on a CPU: matrix products and the steps of LSTM, GRU and RNN, and the
// glimpses of DRAW.
//
// C++17 with the vector extensions of GCC and Clang, independent of torch; the Python files of this
// folder own every tensor. Matrices are row-major, or packed by `pack`. Operands and results of
// matrix products are float32 or bfloat16, everything else is float32. N examples, H hidden units,
// G = gates * H; step t has sizes[t] rows, the first sizes[t] of N examples, and sizes never grow.
//
// Threads split the examples, and each runs its examples through all steps without barriers; with
// few examples and large weights they split the units instead (split_units.h). Weights are centred
// while packing, so that products have mean 0 and a norm needs only their mean square. NaN and
// infinity propagate.

// One translation unit, for inlining.
#include "layer_call.h"
#include "draw.h"
#include "matrices.h"
