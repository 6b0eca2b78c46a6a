"""Matrix products: register tiles, packing, cache blocking and epilogues, generated as LLVM IR."""
