"""What runs inside an observed process: ring file, NVTX ranges, event timing, stream hooks."""
