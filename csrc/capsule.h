// DLPack tensors as Python capsules.
#pragma once

#include <pybind11/pybind11.h>

#include "dlpack.h"

namespace fastdeploy_rl {

// Takes the tensor over. A consumer renames the capsule and owns the tensor
// from then on.
inline pybind11::capsule give_capsule(DLManagedTensor* managed) {
  PyObject* capsule = PyCapsule_New(managed, "dltensor", [](PyObject* self) {
    if (!PyCapsule_IsValid(self, "dltensor")) return;
    auto* unconsumed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
    unconsumed->deleter(unconsumed);
  });
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::capsule>(capsule);
}

}  // namespace fastdeploy_rl
