// SPDX-License-Identifier: Apache-2.0
// RMSNorm, with or without the residual added before it.
#pragma once
#include "tile.h"

namespace {

using baton::RmsNorm;

// Below this a second thread costs more than it saves.
constexpr int64_t kParallelFloats = 16384;

// ``Residual``: see RmsNorm. ``size`` floats in lanes of kPanel; the last lanes may be short.
void rms_norm_row(const RmsNorm& op, const float* x, const float* residual, float* sum, float* out) {
  Wide squares;
  for (int j = 0; j < kVecs; ++j) squares.v[j] = zero();
  for (int i = 0; i < op.size; i += kPanel) {
    const int count = smaller(kPanel, op.size - i);
    alignas(64) float rest[kPanel] = {};
    const bool whole = count == kPanel;
    if (!whole)
      for (int l = 0; l < count; ++l) rest[l] = residual != nullptr ? x[i + l] + residual[i + l] : x[i + l];
    Wide y = load_wide(whole ? x + i : rest);
    if (whole && residual != nullptr) {
      const Wide other = load_wide(residual + i);
      for (int j = 0; j < kVecs; ++j) y.v[j] = add(y.v[j], other.v[j]);
    }
    for (int j = 0; j < kVecs; ++j) squares.v[j] = fma(y.v[j], y.v[j], squares.v[j]);
    float* to = sum != nullptr ? sum : out;
    if (whole)
      store_wide(to + i, y);
    else
      for (int l = 0; l < count; ++l) to[i + l] = rest[l];
  }
  const float scale = 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(op.size) + op.epsilon);
  const float* from = sum != nullptr ? sum : out;
  for (int i = 0; i < op.size; ++i) out[i] = from[i] * scale * op.weight[i];
}

void rms_norm(const RmsNorm& op) {
  const auto some = [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      const ptrdiff_t skip = r * op.size;
      rms_norm_row(op, op.x + skip, op.residual != nullptr ? op.residual + skip : nullptr,
                   op.sum != nullptr ? op.sum + skip : nullptr, op.out + skip);
    }
  };
  if (static_cast<int64_t>(op.rows) * op.size > kParallelFloats)
    in_parts(op.rows, some);
  else
    some(0, op.rows);
}

}  // namespace
