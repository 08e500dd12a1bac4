"""torch.compile on the virtual GPU: Dynamo, AOTAutograd and Inductor run for real, for the chosen GPU.

Inductor's output is a wrapper in Python that allocates every buffer, frees the buffer at its last use, and calls
kernels that only write into their arguments. The virtual GPU runs the generated wrapper on virtual tensors; kernels are
neither compiled nor launched. The allocations are those of a real run, in the same order.
"""
