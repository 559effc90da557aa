"""The data sets that MLCommons and NVIDIA publish, tokenized beforehand. `loader` reads them, with numpy."""
