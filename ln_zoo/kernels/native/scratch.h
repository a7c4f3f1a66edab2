// Memory of one call.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace {

// Uninitialised memory for one call, aligned to cache lines. An arena takes the small blocks of the
// thread's previous one and leaves them to the next: two live arenas never share memory.
class Arena {
 public:
  Arena() : kept_(std::move(spare())) {}
  ~Arena() {
    if (spare().size() < kept_.size()) spare() = std::move(kept_);
  }
  Arena(const Arena&) = delete;

  float* take(int64_t n) {
    n += LINE;
    if (n <= KEPT && next_ == kept_.size()) kept_.emplace_back();
    Piece& own = n <= KEPT ? kept_[next_++] : more_.emplace_back();
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
  static std::vector<Piece>& spare() {
    thread_local std::vector<Piece> pieces;
    return pieces;
  }
  std::vector<Piece> kept_, more_;
  size_t next_ = 0;
};

}  // namespace
