"""From kernel plans to LLVM IR: explicit vectors, fused loops, one function per pass over memory."""
