"""The benchmark behind `rlcore bench`: ours, baselines and floor on the same data, checked first."""
