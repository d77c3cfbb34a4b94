"""What the harness drives: SGLang's own classes around pages on the CPU. To be imported before SGLang is."""

import contextlib

import torch

for _name in ("nms", "qnms"):  # torchvision's wheel cannot load its operators beside a CPU torch; their schemas do
    with contextlib.suppress(RuntimeError):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.set_num_threads(1)
