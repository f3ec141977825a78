"""device_peaks: what data sheets say, and 0 where nothing is known."""

import pytest

from anp_jax.system import device_peaks


@pytest.mark.parametrize(
  'kind, dtype, teraflops',
  [
    ('NVIDIA H100 80GB HBM3', 'bfloat16', 989.5),
    ('NVIDIA H100 PCIe', 'bfloat16', 756.5),
    ('NVIDIA H200', 'float32', 494.5),
    ('NVIDIA GH200 480GB', 'bfloat16', 989.5),
    ('NVIDIA H20', 'bfloat16', 148.0),
    ('NVIDIA A100-SXM4-80GB', 'float32', 156.0),
    ('NVIDIA A10', 'bfloat16', 125.0),
    ('NVIDIA A10G', 'bfloat16', 70.0),
    ('NVIDIA L4', 'bfloat16', 121.0),
    ('NVIDIA L40S', 'bfloat16', 362.05),
    ('Tesla V100-SXM2-16GB', 'float32', 15.7),
    ('Tesla T4', 'bfloat16', 8.1),
    ('TPU v5 lite', 'bfloat16', 197.0),
    ('TPU v5p', 'bfloat16', 459.0),
    ('TPU v6 lite', 'bfloat16', 918.0),
    ('cpu', 'float32', 0.0),
    ('NVIDIA A100-SXM4-80GB', 'float64', 0.0),
    ('NVIDIA A1000', 'bfloat16', 0.0),
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'bfloat16', 0.0),
  ],
)
def test_peak_flops(kind, dtype, teraflops):
  assert device_peaks.peak_flops(kind, dtype) == teraflops * 1e12
