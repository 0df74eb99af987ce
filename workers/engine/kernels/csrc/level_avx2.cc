// SPDX-License-Identifier: Apache-2.0
#include "simd_avx2.h"
// The order matters: what follows is made of the vectors above.
#include "attention.h"
#include "linear.h"
#include "norm.h"

namespace baton {

const Kernels kAvx2 = {"avx2", linear, rms_norm, embed, attention};

}  // namespace baton
