// The gates of a cell, and which of them share statistics.
//
// Macros: CELL; GROUP_OF: group index of each gate, two bits each, first gate lowest.

#pragma once

#include "device.h"

enum CellKind { LSTM, GRU, RNN };

constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;

DEVICE constexpr int group(int gate) { return GROUP_OF >> 2 * gate & 3; }

constexpr int GROUPS = group(GATES - 1) + 1;

// Gates of the groups from one group to another, exclusive.
DEVICE constexpr int gates_in(int from, int to) {
  int count = 0;
  for (int gate = 0; gate < GATES; ++gate) count += group(gate) >= from && group(gate) < to;
  return count;
}
