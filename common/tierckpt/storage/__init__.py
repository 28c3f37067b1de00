"""Storage: bytes on this machine and in stores. No torch."""
