// SPDX-License-Identifier: Apache-2.0
// Products with weights, and the rows of an embedding.
#pragma once
#include "tile.h"

namespace {

using baton::Embed;
using baton::Epilogue;
using baton::Linear;

// Rows that are multiplied with a piece of a panel while it is in the first-level cache.
constexpr int kBlockRows = 192;
// Inputs per such piece: 128 x 32 floats are 16 KiB.
constexpr int kBlockIn = 128;
// So many rows of an embedding are not worth a second thread.
constexpr int kFewRows = 8;

inline const float* widened(const float* from, int, float*) { return from; }

// The same numbers as floats, in ``to``.
inline const float* widened(const uint16_t* from, int count, float* to) {
  for (int i = 0; i < count; i += kPanel) {
    __builtin_prefetch(reinterpret_cast<const char*>(from + i) + kAheadBytes);
    store_wide(to + i, load_wide(from + i));
  }
  return to;
}

// out[rows, kPanel] = x[rows, in] * panel[in, kPanel]. A panel of halves is widened on its way to the registers if
// all rows fit into one register block, else once per piece.
template <class T>
void multiply(const Linear& op, const float* x, int rows, const T* panel, float* wide, float* out) {
  if (rows <= kMaxRows) return tile(rows, x, op.in, panel, kPanel, op.in, out, kPanel, false);
  for (int from = 0; from < op.in; from += kBlockIn) {
    const int count = smaller(kBlockIn, op.in - from);
    const float* piece = widened(panel + from * kPanel, count * kPanel, wide);
    tile(rows, x + from, op.in, piece, kPanel, count, out, kPanel, from > 0);
  }
}

// Bias and activation of one panel's results; writes what is no padding.
void finish(const Linear& op, const float* sums, int rows, int panel, float* out) {
  const float* bias = op.bias != nullptr ? op.bias + static_cast<ptrdiff_t>(panel) * kPanel : nullptr;
  const int width = op.epilogue == Epilogue::kSiluMul ? kPanel / 2 : kPanel;
  const int first = panel * width;
  const int count = smaller(width, op.out_features - first);
  for (int r = 0; r < rows; ++r, sums += kPanel) {
    Wide y = load_wide(sums);
    if (bias != nullptr) {
      const Wide b = load_wide(bias);
      for (int j = 0; j < kVecs; ++j) y.v[j] = add(y.v[j], b.v[j]);
    }
    if (op.epilogue == Epilogue::kSiluMul)
      for (int j = 0; j < kVecs / 2; ++j) {
        const Vec gate = y.v[j], up = y.v[j + kVecs / 2];
        y.v[j] = mul(div(gate, add(set1(1.0f), exp(sub(zero(), gate)))), up);
      }
    float* to = out + static_cast<ptrdiff_t>(r) * op.out_features + first;
    if (count == width) {
      for (int j = 0; j < width / kWidth; ++j) store(to + j * kWidth, y.v[j]);
    } else {
      alignas(64) float all[kPanel];
      store_wide(all, y);
      for (int i = 0; i < count; ++i) to[i] = all[i];
    }
  }
}

template <class T>
void linear_of(const Linear& op) {
  const T* weight = static_cast<const T*>(op.weight);
  const int64_t items = static_cast<int64_t>(blocks_of(op.rows, kBlockRows)) * op.panels;
  in_parts(items, [&](int64_t from, int64_t to) {
    alignas(64) float wide[kBlockIn * kPanel];
    alignas(64) float sums[kBlockRows * kPanel];
    for (int64_t item = from; item < to; ++item) {
      const int first = static_cast<int>(item / op.panels) * kBlockRows, panel = static_cast<int>(item % op.panels);
      const int rows = smaller(kBlockRows, op.rows - first);
      const ptrdiff_t skip = static_cast<ptrdiff_t>(panel) * op.in * kPanel;
      multiply(op, op.x + static_cast<ptrdiff_t>(first) * op.in, rows, weight + skip, wide, sums);
      finish(op, sums, rows, panel, op.out + static_cast<ptrdiff_t>(first) * op.out_features);
    }
  });
}

void linear(const Linear& op) {
  if (op.dtype == Dtype::kHalf)
    linear_of<uint16_t>(op);
  else
    linear_of<float>(op);
}

template <class T>
void embed_of(const Embed& op) {
  const T* weight = static_cast<const T*>(op.weight);
  const auto some = [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      const int64_t id = op.ids[r];
      const T* column = weight + id / kPanel * op.size * kPanel + id % kPanel;
      float* out = op.out + r * op.size;
      for (int i = 0; i < op.size; ++i) out[i] = to_float(column[static_cast<ptrdiff_t>(i) * kPanel]);
    }
  };
  if (op.rows > kFewRows)
    in_parts(op.rows, some);
  else
    some(0, op.rows);
}

void embed(const Embed& op) {
  if (op.dtype == Dtype::kHalf)
    embed_of<uint16_t>(op);
  else
    embed_of<float>(op);
}

}  // namespace
