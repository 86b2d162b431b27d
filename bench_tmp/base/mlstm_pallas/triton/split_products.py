"""split_products in Triton: the recurrence of ``triton/recurrence.py``, with splits as chunks."""

from mlstm_pallas.triton.recurrence import Tiles, split_products

__all__ = ["Tiles", "split_products"]
