// SPDX-License-Identifier: Apache-2.0
#include "simd_portable.h"
// The order matters: what follows is made of the vectors above.
#include "attention.h"
#include "linear.h"
#include "norm.h"

namespace baton {

const Kernels kPortable = {"portable", linear, rms_norm, embed, attention};

}  // namespace baton
