"""FastDeploy's account of what it runs on: a CUDA machine, as the plugin expects one."""


class _Cuda:
    def is_cuda(self) -> bool:
        return True

    def is_xpu(self) -> bool:
        return False

    def is_maca(self) -> bool:
        return False

    def is_intel_hpu(self) -> bool:
        return False


current_platform = _Cuda()
