// SPDX-License-Identifier: Apache-2.0
// What the kernels take. Each processor level (portable, AVX2, AVX-512) has one table of them.
//
// Shapes are in elements, row-major, the last one contiguous. T is the number of tokens of a step: the tokens of all
// sequences lie behind each other. All sums are formed in float32, each in one fixed order, so that no result depends
// on what else is in the step, on how a prompt was cut into chunks, or on the number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "team.h"

namespace baton {

// Output features per panel of weights.
constexpr int kPanel = 32;

// How elements are stored. Halves are IEEE binary16.
enum class Dtype { kFloat, kHalf };

enum class Epilogue { kNone, kSiluMul };

// out = x * weight + bias, or silu(gate) * up of it.
struct Linear {
  const float* x;       // [rows, in]
  const void* weight;   // [panels, in, kPanel]; kSiluMul: the first half of each panel is gate, the second up
  Dtype dtype;          // of weight
  const float* bias;    // [panels, kPanel], or null
  float* out;           // [rows, out_features]
  int rows, in, panels, out_features;
  Epilogue epilogue;
};

// sum = x + residual; out = sum / rms(sum) * weight. Without residual sum is x.
struct RmsNorm {
  const float* x;         // [rows, size]
  const float* residual;  // [rows, size], or null
  const float* weight;    // [size]
  float* sum;             // [rows, size], or null; may be residual
  float* out;             // [rows, size]
  int rows, size;
  float epsilon;
};

// out[i] = row ids[i] of a matrix that is stored in panels.
struct Embed {
  const int64_t* ids;  // [rows]
  const void* weight;  // [panels, size, kPanel]
  Dtype dtype;
  float* out;  // [rows, size]
  int rows, size;
};

// The tokens of one sequence in a step: its positions start .. start + count - 1.
struct Span {
  int32_t first;  // its first token in the step
  int32_t count;
  int32_t start;
  int32_t table;  // where its block table begins in Attention::tables
};

// RoPE on q and k, k and v into the cache, and causal attention of each token over its sequence up to itself.
struct Attention {
  const float* qkv;          // [T, (heads + 2 * kv_heads) * dim]
  const float* cos;          // [max positions, dim]
  const float* sin;          // [max positions, dim], negated in the first half
  const int64_t* positions;  // [T]
  const int64_t* write_rows; // [T]: rows of kv_heads * dim elements from a layer's first row in block 0
  const Span* spans;         // [num_spans]
  const int32_t* tables;     // block numbers
  void* k_cache;             // the layer's first row of K in block 0
  void* v_cache;
  Dtype dtype;        // of the cache
  int64_t block_rows; // rows from one block's start to the next one's
  float* out;         // [T, heads * dim]
  int tokens, num_spans, heads, kv_heads, dim, block_size;
};

struct Kernels {
  const char* name;
  void (*linear)(const Linear&);
  void (*rms_norm)(const RmsNorm&);
  void (*embed)(const Embed&);
  void (*attention)(const Attention&);
};

// Memory of the calling thread, at least ``floats`` long, aligned to 64 bytes; valid until its next call.
float* scratch(size_t floats);

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace baton
