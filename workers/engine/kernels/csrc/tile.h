// SPDX-License-Identifier: Apache-2.0
// The register block that all products are made of, and vector functions over kPanel lanes.
//
// Everything here is compiled once per processor level, in an anonymous namespace and without the standard library:
// the linker must not take a copy of a shared function that the processor at hand cannot run.
#pragma once
#include "kernels.h"

namespace {

using baton::Dtype;
using baton::kPanel;

// How far ahead of the sums weights are fetched from memory.
constexpr int kAheadBytes = 2048;
constexpr int kVecs = kPanel / kWidth;  // vectors per panel row

// kPanel floats. Sums over them are formed in the same order whatever the width of a vector is.
struct Wide {
  Vec v[kVecs];
};

template <class T>
inline Wide load_wide(const T* p) {
  Wide w;
  for (int j = 0; j < kVecs; ++j) w.v[j] = load(p + j * kWidth);
  return w;
}

inline void store_wide(float* p, const Wide& w) {
  for (int j = 0; j < kVecs; ++j) store(p + j * kWidth, w.v[j]);
}

inline float reduce_add(Wide w) {
  for (int n = kVecs / 2; n > 0; n /= 2)
    for (int j = 0; j < n; ++j) w.v[j] = add(w.v[j], w.v[j + n]);
  return reduce_add(w.v[0]);
}

inline float reduce_max(Wide w) {
  for (int n = kVecs / 2; n > 0; n /= 2)
    for (int j = 0; j < n; ++j) w.v[j] = max(w.v[j], w.v[j + n]);
  return reduce_max(w.v[0]);
}

// e^x to about 2 units in the last place; arguments below -87.3 count as that, above 88 as 88. The polynomial is that
// of the Cephes library.
inline Vec exp(Vec x) {
  x = min(set1(88.0f), max(set1(-87.33654f), x));  // in this order: what is not a number stays so
  const Vec magic = set1(12582912.0f);             // 1.5 * 2^23: adding it rounds to a whole number
  const Vec t = fma(x, set1(1.44269504f), magic);
  const Vec n = sub(t, magic);
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return mul(add(fma(mul(p, r), r, r), set1(1.0f)), pow2(t));
}

// c[R, kPanel] (+)= a[R, k] * b[k, kPanel], with row strides lda, ldb, ldc. Each of the sums is one chain of
// multiply-adds in the order of k, however many rows there are and wherever k is cut.
template <int R, class T>
void tile_of(const float* a, ptrdiff_t lda, const T* b, ptrdiff_t ldb, int k, float* c, ptrdiff_t ldc, bool go_on) {
  Vec sums[R][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) sums[r][j] = go_on ? load(c + r * ldc + j * kWidth) : zero();
  for (int i = 0; i < k; ++i, b += ldb) {
    // Halves come from memory, and the processor's own prefetching ends at each page.
    if constexpr (sizeof(T) == 2) __builtin_prefetch(reinterpret_cast<const char*>(b) + kAheadBytes);
    // What there is less of stays in registers.
    if constexpr (R < kVecs) {
      Vec x[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) x[r] = set1(a[r * lda + i]);
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) {
        const Vec weights = load(b + j * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) sums[r][j] = fma(x[r], weights, sums[r][j]);
      }
    } else {
      Vec weights[kVecs];
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) weights[j] = load(b + j * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec x = set1(a[r * lda + i]);
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) sums[r][j] = fma(x, weights[j], sums[r][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) store(c + r * ldc + j * kWidth, sums[r][j]);
}

template <class T, int R = kMaxRows>
inline void tile_of_rows(int rows, const float* a, ptrdiff_t lda, const T* b, ptrdiff_t ldb, int k, float* c,
                         ptrdiff_t ldc, bool go_on) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of_rows<T, R - 1>(rows, a, lda, b, ldb, k, c, ldc, go_on);
  }
  tile_of<R>(a, lda, b, ldb, k, c, ldc, go_on);
}

// As tile_of, for any number of rows, cut into register blocks of about the same height.
template <class T>
void tile(int rows, const float* a, ptrdiff_t lda, const T* b, ptrdiff_t ldb, int k, float* c, ptrdiff_t ldc,
          bool go_on) {
  for (int blocks = (rows + kMaxRows - 1) / kMaxRows; blocks > 0; --blocks) {
    const int some = (rows + blocks - 1) / blocks;
    tile_of_rows(some, a, lda, b, ldb, k, c, ldc, go_on);
    a += some * lda;
    c += some * ldc;
    rows -= some;
  }
}

// Calls ``body(from, to)`` for parts of 0 .. items - 1 that together are all of it; see ``share``.
template <class F>
inline void in_parts(int64_t items, const F& body) {
  baton::share(items, [](const void* of, int64_t from, int64_t to) { (*static_cast<const F*>(of))(from, to); }, &body);
}

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }
inline int blocks_of(int n, int size) { return (n + size - 1) / size; }

}  // namespace
