// Between the steps of batch.h: rows less their means over each step.

#include "device.h"

constexpr int COLUMNS = 32, LINES = 8;  // threads of a block

struct Arguments {
  const void* a;
  void* out;              // (rows, width), may be a
  float* means;           // (steps, width)
  const int* first_rows;  // of each step, and one past the last; null: equal steps of n rows
  int n, width, kind;     // kind of a and out: float32, bfloat16, float16
};

DEVICE float value(const void* a, long long at, int kind) {
  if (kind == 0) return ((const float*)a)[at];
  const u32 bits = ((const u16*)a)[at];
  return kind == 1 ? from_bfloat16(bits) : from_half(bits);
}

// Block (t, j) has columns j * COLUMNS ... of step t.
KERNEL(COLUMNS * LINES, 1) void rows_less_means(const Arguments a) {
  SHARED_MEMORY(memory);
  const int parts = (a.width + COLUMNS - 1) / COLUMNS, t = block_index() / parts;
  const int line = thread_index() / COLUMNS, in_block = thread_index() % COLUMNS;
  const int column = block_index() % parts * COLUMNS + in_block;
  const long long first = a.first_rows ? a.first_rows[t] : (long long)t * a.n;
  const int n = a.first_rows ? a.first_rows[t + 1] - a.first_rows[t] : a.n;
  float* sums = (float*)memory + in_block;
  float sum = 0.0f;
  if (column < a.width)
    for (int row = line; row < n; row += LINES)
      sum += value(a.a, (first + row) * a.width + column, a.kind);
  sums[line * COLUMNS] = sum;
  block_barrier();
  if (column >= a.width) return;
  float mean = 0.0f;
  for (int i = 0; i < LINES; ++i) mean += sums[i * COLUMNS];
  mean /= n;
  if (line == 0) a.means[(long long)t * a.width + column] = mean;
  for (int row = line; row < n; row += LINES) {
    const long long at = (first + row) * a.width + column;
    const float x = value(a.a, at, a.kind) - mean;
    if (a.kind == 0) ((float*)a.out)[at] = x;
    else ((u16*)a.out)[at] = (u16)(a.kind == 1 ? to_bfloat16(x) : to_half(x));
  }
}
