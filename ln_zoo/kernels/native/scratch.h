// Memory of one call.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace {

// Uninitialised memory for one call, aligned to cache lines; small blocks are reused by the
// thread's next call.
class Arena {
 public:
  float* take(int64_t n) {
    n += LINE;
    if (next_ == kept().size()) kept().emplace_back();
    Piece& own = n <= KEPT ? kept()[next_++] : more_.emplace_back();
    if (n > own.size) own = {std::unique_ptr<float[]>(new float[n]), n};
    float* found = own.numbers.get();
    return found + (-(reinterpret_cast<intptr_t>(found) / 4) & (LINE - 1));
  }

 private:
  static constexpr int64_t LINE = 16, KEPT = 1 << 24;
  struct Piece {
    std::unique_ptr<float[]> numbers;
    int64_t size = 0;
  };
  static std::vector<Piece>& kept() {
    thread_local std::vector<Piece> pieces;
    return pieces;
  }
  std::vector<Piece> more_;
  size_t next_ = 0;
};

}  // namespace
