"""Parts of `advise`: calibrate with short runs, simulate each way to use the GPUs, propose the best."""
