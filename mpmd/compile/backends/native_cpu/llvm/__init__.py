"""LLVM IR as text: types, a builder, modules, and the engine that turns them into running code."""
