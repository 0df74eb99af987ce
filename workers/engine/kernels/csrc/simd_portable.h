// SPDX-License-Identifier: Apache-2.0
// Vectors of four floats as GCC and Clang make them for any processor. Products and sums may be rounded separately.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr int kWidth = 4;
constexpr int kMaxRows = 2;

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Bits __attribute__((vector_size(16)));

inline float from_half(uint16_t half) {
  // The exponent of a half is biased by 15, that of a float by 127: scaling by 2^112 also normalizes subnormals.
  uint32_t bits = (half & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  std::memcpy(&bits, &value, 4);
  if ((half & 0x7c00u) == 0x7c00u) bits = 0x7f800000u | (half & 0x3ffu) << 13;  // infinite, or not a number
  bits |= (half & 0x8000u) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Nearest half, ties to even; what is too large becomes NaN.
inline uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 has the processor round at the right place
    float value;
    std::memcpy(&value, &bits, 4);
    value += 0.5f;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

inline Vec zero() { return Vec{}; }
inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const uint16_t* p) { return Vec{from_half(p[0]), from_half(p[1]), from_half(p[2]), from_half(p[3])}; }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// Of two numbers one of which is not a number these two return b.
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

// 2^n, where ``t`` is n + 1.5 * 2^23.
inline Vec pow2(Vec t) {
  Bits bits;
  std::memcpy(&bits, &t, sizeof bits);
  bits = (bits << 23) + 0x3f800000;
  std::memcpy(&t, &bits, sizeof bits);
  return t;
}

inline float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float reduce_max(Vec v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return from_half(x); }

// Eight floats as halves.
inline void narrow8(const float* from, uint16_t* to) {
  for (int i = 0; i < 8; ++i) to[i] = to_half(from[i]);
}

// Eight elements as floats.
template <class T>
inline void widen8(const T* from, float* to) {
  for (int i = 0; i < 8; ++i) to[i] = to_float(from[i]);
}

// Eight rows of eight elements -> the same as columns: ``to[i * stride + j] = rows[j][i]``.
template <class T>
inline void transpose8(const T* const* rows, int offset, float* to, int stride) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) to[i * stride + j] = to_float(rows[j][offset + i]);
}

}  // namespace
