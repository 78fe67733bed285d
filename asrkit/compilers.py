"""What compiled kernels are asked for."""

import torch


def tf32_asked() -> bool:
    """Whether products of float32 on CUDA may be taken in TF32, by whichever of torch's settings that was said.

    `allow_tf32` and `get_float32_matmul_precision` raise where a newer setting was used; this one follows them all.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
