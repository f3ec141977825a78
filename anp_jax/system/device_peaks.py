"""Peak rates of devices, from their data sheets."""

import re

# Dense (not 2:4 sparse) peak TFLOP/s of one JAX device: (pattern in its
# device_kind, bfloat16, float32); the first match wins. float32 is what JAX's
# default precision reaches: TF32 tensor cores since Ampere, the CUDA cores
# before, one bfloat16 pass on TPU. Volta and Turing have no bfloat16 units, so
# it counts as float32 there. From NVIDIA's data sheet of each card (half of a
# rate that it gives as sparse), AWS's for the A10G, and
# cloud.google.com/tpu/docs/system-architecture-tpu-vm; a chip of TPU v2, v3 and
# 7x is two JAX devices, which hold half of the sheet's number.
_PEAKS = (
  (r'GB[23]00', 2500.0, 1250.0),
  (r'B[23]00', 2250.0, 1125.0),
  (r'H[12]00 NVL', 835.5, 417.5),
  (r'H100 PCIe', 756.5, 378.0),
  (r'G?H[12]00', 989.5, 494.5),
  (r'H20', 148.0, 74.0),
  (r'A100', 312.0, 156.0),
  (r'A40', 149.7, 74.8),
  (r'A30', 165.0, 82.0),
  (r'A10G', 70.0, 35.0),
  (r'A10', 125.0, 62.5),
  (r'L40S', 362.05, 183.0),
  (r'L40', 181.05, 90.5),
  (r'L4', 121.0, 60.0),
  (r'V100S', 16.4, 16.4),
  (r'V100-PCIE', 14.0, 14.0),
  (r'V100', 15.7, 15.7),
  (r'T4', 8.1, 8.1),
  (r'TPU ?7x', 1153.5, 1153.5),
  (r'TPU v6( lite|e)', 918.0, 918.0),
  (r'TPU v5( lite|e)', 197.0, 197.0),
  (r'TPU v5p?', 459.0, 459.0),
  (r'TPU v4', 275.0, 275.0),
  (r'TPU v3', 61.5, 61.5),
  (r'TPU v2', 22.5, 22.5),
)


def peak_flops(device_kind: str, dtype: str) -> float:
  """Returns the dense peak FLOP/s of one device; 0.0 where it is unknown.

  Args:
    device_kind: JAX's `device.device_kind`, such as 'NVIDIA H100 80GB HBM3'.
    dtype: compute dtype; 'bfloat16' or 'float32' (TF32 where available).
  """
  # A MIG slice carries the whole chip's name and a part of its units.
  if dtype not in ('bfloat16', 'float32') or ' MIG ' in f'{device_kind} ':
    return 0.0
  for pattern, bfloat16, float32 in _PEAKS:
    if re.search(rf'\b{pattern}\b', device_kind, re.IGNORECASE):
      return (bfloat16 if dtype == 'bfloat16' else float32) * 1e12
  return 0.0
