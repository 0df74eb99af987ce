// SPDX-License-Identifier: Apache-2.0
// The kernels as Paddle operators on CPU tensors. They check what they are given, choose the processor level, and call.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/api.h"

namespace baton {

float* scratch(size_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<float, Free> memory;
  static thread_local size_t room = 0;
  if (room < floats) {
    const size_t rounded = (floats + 15) / 16 * 16;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, rounded * sizeof(float))));
    if (memory == nullptr) throw std::bad_alloc();
    room = rounded;
  }
  return memory.get();
}

namespace {

const Kernels* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return &kAvx512;
  if (avx2) return &kAvx2;
#endif
  return &kPortable;
}

const Kernels* chosen = best();

using paddle::Tensor;
using Tensors = std::vector<Tensor>;

void check(bool holds, const char* what) {
  if (!holds) PD_THROW("Baton kernel: ", what);
}

Dtype dtype_of(const Tensor& t) {
  check(t.dtype() == phi::DataType::FLOAT16 || t.dtype() == phi::DataType::FLOAT32, "neither float16 nor float32");
  return t.dtype() == phi::DataType::FLOAT16 ? Dtype::kHalf : Dtype::kFloat;
}

const void* bytes(const Tensor& t) {
  return dtype_of(t) == Dtype::kHalf ? static_cast<const void*>(t.data<phi::dtype::float16>())
                                     : static_cast<const void*>(t.data<float>());
}

Tensor new_floats(int64_t rows, int64_t columns) {
  return paddle::experimental::empty({rows, columns}, phi::DataType::FLOAT32, phi::CPUPlace());
}

}  // namespace

// X [rows, in], Weight [panels, in, 32], Bias [panels, 32] or none -> [rows, out_features].
Tensors linear(const Tensor& x, const Tensor& weight, const paddle::optional<Tensor>& bias, int64_t out_features,
               bool silu_mul) {
  const int64_t rows = x.shape()[0], in = x.shape()[1], panels = weight.shape()[0];
  const int64_t width = silu_mul ? kPanel / 2 : kPanel;
  check(weight.shape()[1] == in && weight.shape()[2] == kPanel, "weight is not [panels, in, 32]");
  check(panels == (out_features + width - 1) / width, "out_features does not fit the weight");
  check(!bias || bias->numel() == panels * kPanel, "bias is not [panels, 32]");
  Tensor out = new_floats(rows, out_features);
  chosen->linear({x.data<float>(), bytes(weight), dtype_of(weight), bias ? bias->data<float>() : nullptr,
                  out.data<float>(), static_cast<int>(rows), static_cast<int>(in), static_cast<int>(panels),
                  static_cast<int>(out_features), silu_mul ? Epilogue::kSiluMul : Epilogue::kNone});
  return {out};
}

// Ids int64 [rows], Weight [panels, size, 32] -> [rows, size].
Tensors embed(const Tensor& ids, const Tensor& weight) {
  const int64_t rows = ids.numel(), size = weight.shape()[1];
  Tensor out = new_floats(rows, size);
  chosen->embed({ids.data<int64_t>(), bytes(weight), dtype_of(weight), out.data<float>(), static_cast<int>(rows),
                 static_cast<int>(size)});
  return {out};
}

// X [rows, size], Weight [size] -> [rows, size].
Tensors rms_norm(const Tensor& x, const Tensor& weight, float epsilon) {
  const int64_t rows = x.shape()[0], size = x.shape()[1];
  check(weight.numel() == size, "the norm's weight has another size than x");
  Tensor out = new_floats(rows, size);
  chosen->rms_norm({x.data<float>(), nullptr, weight.data<float>(), nullptr, out.data<float>(),
                    static_cast<int>(rows), static_cast<int>(size), epsilon});
  return {out};
}

// X and Residual [rows, size], Weight [size] -> the norm of their sum, and the sum.
Tensors add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, float epsilon) {
  const int64_t rows = x.shape()[0], size = x.shape()[1];
  check(weight.numel() == size && residual.numel() == x.numel(), "x, residual and weight differ in size");
  Tensor out = new_floats(rows, size), sum = new_floats(rows, size);
  chosen->rms_norm({x.data<float>(), residual.data<float>(), weight.data<float>(), sum.data<float>(),
                    out.data<float>(), static_cast<int>(rows), static_cast<int>(size), epsilon});
  return {out, sum};
}

// QKV [T, (heads + 2 * kv_heads) * dim]; KCache and VCache [rows, kv_heads * dim], one layer's, written to in place;
// Cos and Sin [max positions, dim]; Positions and WriteRows int64 [T]; Spans int32 [spans, 4], Tables int32: see
// kernels.h. -> [T, heads * dim].
Tensors attention(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache, const Tensor& cos,
                  const Tensor& sin, const Tensor& positions, const Tensor& write_rows, const Tensor& spans,
                  const Tensor& tables, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t block_rows) {
  const int64_t tokens = qkv.shape()[0], dim = cos.shape()[1];
  check(dim % 8 == 0, "the head size is no multiple of 8");
  check(heads % kv_heads == 0, "heads is no multiple of kv_heads");
  check(qkv.shape()[1] == (heads + 2 * kv_heads) * dim, "qkv is not [tokens, (heads + 2 * kv_heads) * dim]");
  check(k_cache.dtype() == v_cache.dtype() && k_cache.shape()[1] == kv_heads * dim, "k_cache and v_cache do not fit");
  check(positions.numel() == tokens && write_rows.numel() == tokens, "positions and write_rows are not [tokens]");
  Tensor out = new_floats(tokens, heads * dim);
  chosen->attention({qkv.data<float>(), cos.data<float>(), sin.data<float>(), positions.data<int64_t>(),
                     write_rows.data<int64_t>(), reinterpret_cast<const Span*>(spans.data<int32_t>()),
                     tables.data<int32_t>(), const_cast<void*>(bytes(k_cache)), const_cast<void*>(bytes(v_cache)),
                     dtype_of(k_cache), block_rows, out.data<float>(), static_cast<int>(tokens),
                     static_cast<int>(spans.shape()[0]), static_cast<int>(heads), static_cast<int>(kv_heads),
                     static_cast<int>(dim), static_cast<int>(block_size)});
  return {out};
}

// A decoder layer of the operators above, called at once: what a call costs is then paid once per layer. X and Residual
// [T, hidden]: the last layer's two results, which nobody has added yet; the first layer has no Residual.
Tensors layer(const Tensor& x, const Tensor& input_norm, const Tensor& qkv, const Tensor& o, const Tensor& post_norm,
              const Tensor& gate_up, const Tensor& down, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& cos, const Tensor& sin, const Tensor& positions, const Tensor& write_rows,
              const Tensor& spans, const Tensor& tables, const paddle::optional<Tensor>& residual,
              const paddle::optional<Tensor>& qkv_bias, int64_t heads, int64_t kv_heads, int64_t block_size,
              int64_t block_rows, float epsilon) {
  const int64_t hidden = x.shape()[1], qkv_size = (heads + 2 * kv_heads) * cos.shape()[1];
  Tensors normed =
      residual ? add_rms_norm(x, *residual, input_norm, epsilon) : Tensors{rms_norm(x, input_norm, epsilon)[0], x};
  const Tensor projected = linear(normed[0], qkv, qkv_bias, qkv_size, false)[0];
  const Tensor mixed = attention(projected, k_cache, v_cache, cos, sin, positions, write_rows, spans, tables, heads,
                                 kv_heads, block_size, block_rows)[0];
  const Tensor attended = linear(mixed, o, paddle::none, hidden, false)[0];
  normed = add_rms_norm(attended, normed[1], post_norm, epsilon);
  const Tensor inner = linear(normed[0], gate_up, paddle::none, down.shape()[1], true)[0];
  return {linear(inner, down, paddle::none, hidden, false)[0], normed[1]};
}

}  // namespace baton

PD_BUILD_OP(baton_linear)
    .Inputs({"X", "Weight", paddle::Optional("Bias")})
    .Outputs({"Out"})
    .Attrs({"out_features: int64_t", "silu_mul: bool"})
    .SetKernelFn(PD_KERNEL(baton::linear));

PD_BUILD_OP(baton_embed).Inputs({"Ids", "Weight"}).Outputs({"Out"}).SetKernelFn(PD_KERNEL(baton::embed));

PD_BUILD_OP(baton_rms_norm)
    .Inputs({"X", "Weight"})
    .Outputs({"Out"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(baton::rms_norm));

PD_BUILD_OP(baton_add_rms_norm)
    .Inputs({"X", "Residual", "Weight"})
    .Outputs({"Out", "Sum"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(baton::add_rms_norm));

PD_BUILD_OP(baton_attention)
    .Inputs({"QKV", "KCache", "VCache", "Cos", "Sin", "Positions", "WriteRows", "Spans", "Tables"})
    .Outputs({"Out"})
    .Attrs({"heads: int64_t", "kv_heads: int64_t", "block_size: int64_t", "block_rows: int64_t"})
    .SetKernelFn(PD_KERNEL(baton::attention));

PD_BUILD_OP(baton_layer)
    .Inputs({"X", "InputNorm", "QKV", "O", "PostNorm", "GateUp", "Down", "KCache", "VCache", "Cos", "Sin", "Positions",
             "WriteRows", "Spans", "Tables", paddle::Optional("Residual"), paddle::Optional("QKVBias")})
    .Outputs({"Out", "Sum"})
    .Attrs({"heads: int64_t", "kv_heads: int64_t", "block_size: int64_t", "block_rows: int64_t", "epsilon: float"})
    .SetKernelFn(PD_KERNEL(baton::layer));

// See set_threads in team.h.
extern "C" void baton_set_threads(int own, int borrowed, int processors, const baton::Member* members, int count,
                                  int self) {
  baton::set_threads(own, borrowed, processors, members, count, self);
}

// See threads_now in team.h.
extern "C" int baton_threads_now() { return baton::threads_now(); }

// The processor level in use: "portable", "avx2" or "avx512".
extern "C" const char* baton_level() { return baton::chosen->name; }

// Use another level than the best one; for tests. Returns whether it is known here and this processor can run it.
extern "C" bool baton_set_level(const char* name) {
  std::vector<const baton::Kernels*> able = {&baton::kPortable};
#if defined(__x86_64__)
  if (baton::best() != &baton::kPortable) able.push_back(&baton::kAvx2);
  if (baton::best() == &baton::kAvx512) able.push_back(&baton::kAvx512);
#endif
  for (const baton::Kernels* each : able)
    if (std::strcmp(each->name, name) == 0) {
      baton::chosen = each;
      return true;
    }
  return false;
}
