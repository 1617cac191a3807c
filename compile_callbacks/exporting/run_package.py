"""Run an AOTInductor package once: a script for a process of its own, which imports torch alone.

Usage: ``run_package.py PACKAGE TENSORS``, the input tensors as `torch.save` writes a list of them.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, in which are names that others may ask for
    import torch

    package, tensors = sys.argv[1:]
    inputs = torch.load(tensors, weights_only=True)
    torch._inductor.aoti_load_package(package).loader.boxed_run(inputs)
    torch.accelerator.synchronize()
