"""
Dense peak FLOP/s by device name and dtype, as the makers' data sheets give them.

Names are `torch.cuda.get_device_name()`, matched whole: a slice of a GPU ("... MIG 1g.10gb") or a
variant that is not listed has no peak here, and its MFU is n/a rather than wrong. fp32 is without
TF32, torch's default. Cards whose published figures disagree are left out: --peak-tflops says it.
"""

from __future__ import annotations

import re

TERA = 1e12

# (whole device name, bf16 on tensor cores, fp32), in 1e12 FLOP/s; None: not published for it
PEAKS: tuple[tuple[str, float | None, float | None], ...] = (
    (r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", 312, 19.5),
    (r"NVIDIA H100 80GB HBM3", 989, 67),
    (r"NVIDIA H100 PCIe", 756, 51),
    (r"NVIDIA H100 NVL", 835, 60),
    (r"NVIDIA H200", 989, 67),
    (r"NVIDIA H20", 148, 44),
    (r"NVIDIA B200|NVIDIA B300", 2250, None),
    (r"NVIDIA GB200|NVIDIA GB300", 2500, None),
    (r"NVIDIA L40S", 362, 91.6),
    (r"NVIDIA L40", 181, 90.5),
    (r"NVIDIA L4", 121, 30.3),
    (r"NVIDIA A40", 149.7, 37.4),
    (r"NVIDIA A10", 125, 31.2),
    (r"NVIDIA RTX A6000", 154.8, 38.7),
    (r"AMD Instinct MI250X", 191.5, None),
    (r"AMD Instinct (MI300X|MI325X)", 1300, None),
    (r"AMD Instinct MI355X", 2500, None),
)


def peak(device: str, dtype: str) -> float | None:
    """FLOP/s of one device, or None where this table doesn't know."""
    for name, bf16, fp32 in PEAKS:
        if re.fullmatch(name, device.strip()):
            tera = bf16 if dtype == "bf16" else fp32
            return None if tera is None else tera * TERA
    return None
