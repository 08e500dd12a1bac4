"""SGLang without its compiled code, as when its wheels are installed beside torch for the CPU.

The engine's Python code runs unmodified. What is compiled in its package of kernels (sgl_kernel) is defined by the
schemas in the package's own files, as vLLM's is (stubs/vllm/binaries.py). engine.py runs the scheduler, which holds the
model, in this process and reads what it computes.

Source: sgl-project/sglang@v0.5.13.
"""
