"""Figures of accelerators from public data sheets, in one table.

All figures are peaks of ONE DEVICE as JAX counts devices, without sparsity. Data sheets that count both directions of a link, or
all links of a chip, are divided; `source` says how. What they call GB of memory is what the driver reports as GiB.
"""

from __future__ import annotations

from typing import NamedTuple


class Hardware(NamedTuple):
    """One device and its links.

    Attributes:
      peak_tflops: dense matmuls in bfloat16 or float16, 1e12 FLOP/s.
      memory_gib: memory of the device.
      link_gbs: what a device can send to its neighbour in the ring, one direction, 1e9 bytes/s.
      is_torus: whether the two neighbours are on links of their own, so that sending both ways doubles the rate. Behind a
        switch a device has one port, whose rate both neighbours share.
      domain: how many devices these links connect.
      network_gbs: the same as `link_gbs` for a hop that leaves the domain.
      source: where the figures are from.
    """

    peak_tflops: float
    memory_gib: float
    link_gbs: float
    is_torus: bool
    domain: int
    network_gbs: float
    source: str

    def ring_link_gbs(self, ring_size: int) -> float:
        """Rate of the slowest link of a ring: every hop waits for it."""
        return self.link_gbs if ring_size <= self.domain else min(self.link_gbs, self.network_gbs)


_GOOGLE = "Google Cloud, docs.cloud.google.com/tpu/docs/"

HARDWARE = {
    "a100": Hardware(
        312,
        80,
        300,
        False,
        8,
        25,
        "NVIDIA A100 80GB SXM data sheet: NVLink 600 GB/s, both directions; DGX A100 data sheet: a 200 Gb/s adapter per GPU",
    ),
    "h100": Hardware(
        989,
        80,
        450,
        False,
        8,
        50,
        "NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, NVLink 900 GB/s, both directions; DGX H100 data sheet: a "
        "400 Gb/s adapter per GPU",
    ),
    "h200": Hardware(
        989,
        141,
        450,
        False,
        8,
        50,
        "NVIDIA H200 SXM data sheet: 1,979 TFLOP/s with sparsity, NVLink 900 GB/s, both directions; DGX H200 data sheet: a "
        "400 Gb/s adapter per GPU",
    ),
    "b200": Hardware(
        2250,
        180,
        900,
        False,
        8,
        50,
        "NVIDIA HGX B200 data sheet: 4.5 PFLOP/s with sparsity, NVLink 1.8 TB/s, both directions; DGX B200 data sheet: "
        "1,440 GB in 8 GPUs, a 400 Gb/s adapter per GPU",
    ),
    "v4": Hardware(
        275,
        32,
        50,
        True,
        4096,
        6.25,
        _GOOGLE + "v4; links: Jouppi et al. 2023, 'TPU v4', 6 of 50 GB/s; between pods: 50 Gb/s assumed, as for v5p",
    ),
    "v5e": Hardware(
        197,
        16,
        50,
        True,
        256,
        3.125,
        _GOOGLE + "v5e: ICI 400 GB/s per chip, both directions, 4 ports; between pods: 6.4 Tb/s per pod of 256",
    ),
    "v5p": Hardware(
        459,
        95,
        100,
        True,
        8960,
        6.25,
        _GOOGLE + "tpu7x: ICI 1200 GB/s per chip, both directions, 6 links of a 3D torus; between pods: 50 Gb/s per chip",
    ),
    "v6e": Hardware(
        918,
        32,
        100,
        True,
        256,
        12.5,
        _GOOGLE + "tpu7x: ICI 800 GB/s per chip, both directions, 4 links of a 2D torus; between pods: 100 Gb/s per chip",
    ),
    "tpu7x": Hardware(
        1153.5,
        96,
        100,
        True,
        18432,
        6.25,
        _GOOGLE + "tpu7x: a chip is two JAX devices and has 2307 TFLOP/s, 192 GiB, ICI 1200 GB/s, both directions, 6 links of a "
        "3D torus; between pods: 100 Gb/s per chip",
    ),
}
