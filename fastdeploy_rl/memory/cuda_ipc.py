"""CUDA memory between processes: the door to `cuda_exports`, `cuda_imports` and the record that goes between them.

    with CudaExporter(directory) as exporter:                 # trainer
        record = exporter.export_tensor(tensor)               # or exporter.allocate(num_bytes).record()
        send(record.to_json())

    with CudaImports(directory) as imports:                   # engine, another process on the same device
        with imports.open(CudaRecord.from_json(data)) as memory:
            tensor = from_dlpack(memory.dlpack(shape, "BF16"))

Tested on testing.fake_cuda; not run on a GPU.
"""

from fastdeploy_rl.memory.cuda_devices import CudaDevice, visible_devices
from fastdeploy_rl.memory.cuda_exports import CudaAllocation, CudaExporter
from fastdeploy_rl.memory.cuda_imports import CudaImport, CudaImports
from fastdeploy_rl.memory.cuda_record import CudaRecord

__all__ = [
    "CudaAllocation",
    "CudaDevice",
    "CudaExporter",
    "CudaImport",
    "CudaImports",
    "CudaRecord",
    "visible_devices",
]
