// SPDX-License-Identifier: Apache-2.0
#include "simd_avx512.h"
// The order matters: what follows is made of the vectors above.
#include "attention.h"
#include "linear.h"
#include "norm.h"

namespace baton {

const Kernels kAvx512 = {"avx512", linear, rms_norm, embed, attention};

}  // namespace baton
