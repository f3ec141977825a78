"""Commands that ask questions about runs; the package never imports them."""
