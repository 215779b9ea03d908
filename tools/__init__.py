"""Tools that work on a checkout: the benchmark, the import rules, the model download. Not in the wheel."""
