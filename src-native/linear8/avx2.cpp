#include <immintrin.h>

#define PIPEEDGE_VECTOR_BYTES 32
#include "passes.inc"

namespace pipeedge::linear8 {
namespace {

/// Products that one instruction adds up for each column.
constexpr size_t kQuad = 4;

constexpr size_t kTileRows = 2;
constexpr size_t kRegisters = kColumns / 8;

/// Multiplies kRows rows. vpmaddubsw needs one factor without sign and adds two products in 16 bits: |x| and w with the
/// sign of x, of at most 127 each, cannot overflow it. The codes are made signed, so the sums begin with 0.
template <size_t kRows>
void multiply_rows(const uint8_t* codes, size_t stride, const int8_t* panel, size_t steps, int32_t* sums) {
  const __m256i zero = _mm256_set1_epi8(static_cast<char>(kZero));
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i total[kRows][kRegisters];
#pragma GCC unroll 2
  for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kRegisters; ++c) total[r][c] = _mm256_setzero_si256();
  }
  const int8_t* weights = panel + kColumns * sizeof(int32_t);
  for (size_t q = 0; q < steps; ++q, codes += kQuad, weights += kColumns * kQuad) {
#pragma GCC unroll 2
    for (size_t r = 0; r < kRows; ++r) {
      int32_t four;
      memcpy(&four, codes + r * stride, sizeof four);
      const __m256i x = _mm256_xor_si256(_mm256_set1_epi32(four), zero);
      const __m256i size = _mm256_abs_epi8(x);
#pragma GCC unroll 4
      for (size_t c = 0; c < kRegisters; ++c) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + c * 32));
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w, x));
        total[r][c] = _mm256_add_epi32(total[r][c], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
#pragma GCC unroll 2
  for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kRegisters; ++c) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kColumns + c * 8), total[r][c]);
    }
  }
}

void multiply(const uint8_t* codes, size_t stride, size_t rows, const int8_t* panel, size_t steps, int32_t* sums) {
  (rows == 1 ? multiply_rows<1> : multiply_rows<2>)(codes, stride, panel, steps, sums);
}

}  // namespace

const Variant kAvx2 = {"avx2", kTileRows, kQuad, kQuad, multiply, quantise, finish};

}  // namespace pipeedge::linear8
