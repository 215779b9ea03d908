#!/usr/bin/env bash
# The op's cases on one CUDA device, in ten minutes at most. It has not run yet: no CUDA machine was at hand.
#
#     tools/bench/gpu.sh [OUT]      # OUT: folder for the JSON files, default tools/bench/results
#
# bfloat16, V = 151,936, 8192 tokens, TP 1. The table has GB/s of the op and of a copy measured in the same run,
# and the ratio to the floor (aim: 1.5). First what a CUDA machine uses by default, then the compiled passes.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-tools/bench/results}
mkdir -p "$out"
for backend in auto compile; do
    PYTHONPATH=. timeout 290 "${PYTHON:-python3}" -m rlcore.cli bench --case op --device cuda --tp 1 \
        --dtype bfloat16 --tokens 8192 --repeats 5 --backend "$backend" --json "$out/gpu_op_$backend.json"
done
