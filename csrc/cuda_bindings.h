// The CUDA part of fastdeploy_rl._native.
#pragma once

#include <pybind11/pybind11.h>

namespace fastdeploy_rl {

void bind_cuda(pybind11::module_& m);

}  // namespace fastdeploy_rl
