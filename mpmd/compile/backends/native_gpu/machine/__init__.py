"""What machine code says about the time of kernels, on a machine without a GPU.

disassembly   a cubin as instructions: pipe, width, what each waits for, the line it was made from
loops         how often a program executes each of them
rates         the constants of the model, in one table
execution     a program by itself, and what it asks of each pipe of its multiprocessor
times         a launch: how many programs share a multiprocessor, the time, and what bounds it
report        all launches of a program, as text and as findings
"""
