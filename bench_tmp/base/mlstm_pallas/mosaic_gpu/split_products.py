"""split_products on Mosaic GPU: ``mosaic_gpu/recurrence.py`` computes only the sums of splits."""

from mlstm_pallas.mosaic_gpu.recurrence import Tiles, split_products

__all__ = ["Tiles", "split_products"]
