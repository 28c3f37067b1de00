"""Parts of the benchmarks: the folders belong to one benchmark each, the modules to several."""
