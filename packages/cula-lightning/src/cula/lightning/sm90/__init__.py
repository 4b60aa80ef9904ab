"""Lightning Attention kernels for Hopper (sm_90a); DESIGN.md describes them."""
