"""The loss alone: advantages, objectives, and the losses over the kernels. It needs torch and triton, nothing else."""
