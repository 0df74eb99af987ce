// SPDX-License-Identifier: Apache-2.0
// Vectors of sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kWidth = 16;
// Rows of a register block: 12 x 2 sums, 2 vectors of weights and 1 of x are 27 of 32 registers.
constexpr int kMaxRows = 12;

using Vec = __m512;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// Of two numbers one of which is not a number these two return b.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }

// 2^n, where ``t`` is n + 1.5 * 2^23.
inline Vec pow2(Vec t) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f800000)));
}

#include "simd_x86.h"

inline float reduce_add(Vec v) { return reduce_add8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))); }
inline float reduce_max(Vec v) { return reduce_max8(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))); }

}  // namespace
