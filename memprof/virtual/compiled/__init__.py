"""torch.compile on the virtual GPU: Dynamo, AOTAutograd and Inductor run for real, for the chosen GPU.

Inductor's output is a wrapper in Python that allocates every buffer, gives each back at its last use, and calls kernels
that only write into what they are given. Here the wrapper runs as it was generated, on virtual tensors; kernels are
neither compiled nor launched. What is allocated is what a real run allocates, in its order.
"""
