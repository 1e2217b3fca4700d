#include <immintrin.h>

#define PIPEEDGE_VECTOR_BYTES 64
#include "passes.inc"

namespace pipeedge::linear8 {
namespace {

/// Products that one instruction adds up for each column.
constexpr size_t kQuad = 4;

/// Two registers of sums for each row, two of weights and one of codes fit the 32 registers.
constexpr size_t kTileRows = 14;

template <size_t kRows>
void multiply_rows(const uint8_t* codes, size_t stride, const int8_t* panel, size_t steps, int32_t* sums) {
  const __m512i start[2] = {_mm512_loadu_si512(panel), _mm512_loadu_si512(panel + 64)};
  __m512i total[kRows][2];
#pragma GCC unroll 14
  for (size_t r = 0; r < kRows; ++r) {
    total[r][0] = start[0];
    total[r][1] = start[1];
  }
  const int8_t* weights = panel + kColumns * sizeof(int32_t);
  // An address may add the stride once or twice, so that one pointer serves three rows.
  constexpr size_t kPointers = (kRows + 2) / 3;
  const uint8_t* pointers[kPointers];
#pragma GCC unroll 5
  for (size_t p = 0; p < kPointers; ++p) pointers[p] = codes + 3 * p * stride;
  for (size_t q = 0; q < steps; ++q, weights += kColumns * kQuad) {
    const __m512i low = _mm512_loadu_si512(weights), high = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 14
    for (size_t r = 0; r < kRows; ++r) {
      int32_t four;
      memcpy(&four, pointers[r / 3] + r % 3 * stride + q * kQuad, sizeof four);
      const __m512i x = _mm512_set1_epi32(four);
      total[r][0] = _mm512_dpbusd_epi32(total[r][0], x, low);
      total[r][1] = _mm512_dpbusd_epi32(total[r][1], x, high);
    }
  }
#pragma GCC unroll 14
  for (size_t r = 0; r < kRows; ++r) {
    _mm512_storeu_si512(sums + r * kColumns, total[r][0]);
    _mm512_storeu_si512(sums + r * kColumns + 16, total[r][1]);
  }
}

using MultiplyRows = void (*)(const uint8_t*, size_t, const int8_t*, size_t, int32_t*);

constexpr MultiplyRows kByRows[kTileRows] = {multiply_rows<1>,  multiply_rows<2>,  multiply_rows<3>,  multiply_rows<4>,
                                             multiply_rows<5>,  multiply_rows<6>,  multiply_rows<7>,  multiply_rows<8>,
                                             multiply_rows<9>,  multiply_rows<10>, multiply_rows<11>, multiply_rows<12>,
                                             multiply_rows<13>, multiply_rows<14>};

void multiply(const uint8_t* codes, size_t stride, size_t rows, const int8_t* panel, size_t steps, int32_t* sums) {
  kByRows[rows - 1](codes, stride, panel, steps, sums);
}

}  // namespace

const Variant kAvx512Vnni = {"avx512vnni", kTileRows, kQuad, kQuad, multiply, quantise, finish};

}  // namespace pipeedge::linear8
