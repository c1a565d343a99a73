"""What is right and how fast it is on a GPU, in under eight minutes, with torch, triton and numba alone.

`scripts/gpu_check.sh` runs the parts one after another, each in a process of its own with a limit of its own; one that
fails, hangs or takes the process down is named in the table and leaves the others. Each part is a module of this
package with `items(setup)`: what it does, by name, in order.
"""
