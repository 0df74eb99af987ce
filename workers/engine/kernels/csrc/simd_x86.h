// SPDX-License-Identifier: Apache-2.0
// What AVX2 and AVX-512 share. No include guard: it becomes part of the anonymous namespace around it.

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load8(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return _cvtsh_ss(x); }

// Eight elements as floats.
template <class T>
inline void widen8(const T* from, float* to) {
  _mm256_storeu_ps(to, load8(from));
}

// Eight floats to the nearest halves, ties to even; what is too large becomes NaN.
inline void narrow8(const float* from, uint16_t* to) {
  const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  const __m128i magnitude = _mm_and_si128(half, _mm_set1_epi16(0x7fff));
  const __m128i infinite = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7c00));
  const __m128i quiet = _mm_and_si128(infinite, _mm_set1_epi16(0x0200));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_or_si128(half, quiet));
}

inline float reduce_add8(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

inline float reduce_max8(__m256 v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

// Eight rows of eight elements -> the same as columns: ``to[i * stride + j] = rows[j][i]``.
template <class T>
inline void transpose8(const T* const* rows, int offset, float* to, int stride) {
  __m256 r[8], u[8], s[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) r[j] = load8(rows[j] + offset);
#pragma GCC unroll 4
  for (int j = 0; j < 8; j += 2) {
    u[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
    u[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
  }
#pragma GCC unroll 2
  for (int j = 0; j < 8; j += 4) {
    s[j] = _mm256_shuffle_ps(u[j], u[j + 2], 0x44);
    s[j + 1] = _mm256_shuffle_ps(u[j], u[j + 2], 0xee);
    s[j + 2] = _mm256_shuffle_ps(u[j + 1], u[j + 3], 0x44);
    s[j + 3] = _mm256_shuffle_ps(u[j + 1], u[j + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(s[i], s[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(s[i], s[i + 4], 0x31));
  }
}
