"""vLLM without its compiled code, as when its wheel is installed beside torch for the CPU.

The engine's Python code runs unmodified. Its compiled modules cannot be loaded without CUDA: their operators are
defined by the schemas that the modules themselves contain (schemas.py, binaries.py), and allocate as the real ones do
(operators.py, attention.py). engine.py has what starts the engine in this process and reads what it computes.

Source: vllm-project/vllm@v0.33.0.
"""
