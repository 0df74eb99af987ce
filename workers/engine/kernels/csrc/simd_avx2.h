// SPDX-License-Identifier: Apache-2.0
// Vectors of eight floats: AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kWidth = 8;
// Rows of a register block: 3 x 4 sums, a vector of weights and 3 of x are all 16 registers.
constexpr int kMaxRows = 3;

using Vec = __m256;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// Of two numbers one of which is not a number these two return b.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }

// 2^n, where ``t`` is n + 1.5 * 2^23.
inline Vec pow2(Vec t) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)));
}

#include "simd_x86.h"

inline float reduce_add(Vec v) { return reduce_add8(v); }
inline float reduce_max(Vec v) { return reduce_max8(v); }

}  // namespace
