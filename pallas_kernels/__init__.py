"""GPU kernels as functions of plain arrays; they know nothing of specs or states."""
