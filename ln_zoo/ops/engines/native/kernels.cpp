// Normalised recurrent layers on a CPU: matrix products and the steps of LSTM, GRU and RNN, and the
// glimpses of DRAW.
//
// Plain C++17 with the vector extensions of GCC and Clang; nothing here knows of torch. The callers
// (the Python files of this folder) own every tensor. All matrices are row-major, "packed" ones as
// `pack` lays them out; what matrix products read and write is float32 or bfloat16, all else
// float32. Letters: N examples, H hidden units, G = gates * H; step t has sizes[t] rows, its
// examples being the first sizes[t] of N, and sizes never grow.
//
// Threads share the examples: a thread takes its examples through all steps of a call without
// meeting the others. Where examples are few and the weight is large they share the units instead
// (split_units.h). Weights of centred normalisations are centred when they are packed, so that the
// products have mean zero and a norm needs only their mean square. Arithmetic keeps NaN and
// infinity.

// One unit, so that whatever is small is inlined.
#include "layer_call.h"
#include "draw.h"
