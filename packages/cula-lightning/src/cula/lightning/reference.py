"""Lightning Attention in plain PyTorch: the truth, and the CPU path.

The recurrence over a batch is `cula.common.reference.lightning_forward`, which the decode family is
held to as well.
"""

from cula.common.reference import LightningForm, LightningInputs, lightning_forward

__all__ = ["LightningForm", "LightningInputs", "lightning_forward"]
