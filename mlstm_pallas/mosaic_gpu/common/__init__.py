"""What the Mosaic GPU kernels share: copies, products, persistent CTAs, launches."""
