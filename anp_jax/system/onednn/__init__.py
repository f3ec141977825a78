"""oneDNN: convolutions and batch norm of a CPU, called from XLA's programs.

XLA's CPU backend computes convolutions in bfloat16 no faster than in float32,
and their gradients slower than PyTorch, which gives them to oneDNN. So does
this package, over oneDNN's public C interface: no compiler is needed, and none
of JAX's private names.

| module | what it does |
|---|---|
| library | finds the shared library, checks it, opens it |
| c_api | names of oneDNN's C interface, as ctypes takes them |
| operations | convolutions, norms and mean pools, one for each shape |
| custom_call | lets XLA's programs call them |
| self_test | compares the results of a library with NumPy's, in a process |
"""
