"""Image files: their bytes, and what Pillow makes of them."""
