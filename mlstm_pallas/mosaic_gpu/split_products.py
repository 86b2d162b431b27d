"""split_products on Mosaic GPU: the recurrence of ``mosaic_gpu/recurrence.py``, of sums alone."""

from mlstm_pallas.mosaic_gpu.recurrence import Tiles, split_products

__all__ = ["Tiles", "split_products"]
