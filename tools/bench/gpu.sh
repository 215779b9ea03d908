#!/usr/bin/env bash
# The op on one CUDA device: bfloat16, V=151,936, 8,192 tokens, Triton. At most 10 minutes.
#
# NOT YET RUN. It was prepared on machines without a GPU, where the kernels are checked in Triton's interpreter
# and by compiling them for compute capability 9.0; no speed of theirs has been measured. Remove this paragraph
# with the first results.
#
#   bash tools/bench/gpu.sh [FOLDER]     results go to FOLDER (runs/gpu); PYTHON=... chooses the interpreter
#
# Needs: a CUDA build of torch (it brings Triton), and the packages of `pip install -e '.[dev]'`.
# Prints 1. whether the kernels are right on this device, 2. GB/s of each pass beside a measured copy,
# 3. the op against the sorting baselines and the floor (aim: at most 1.5 times the floor).
# Exit 1 when a test fails or a part runs out of time; the other parts run all the same.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=${1:-runs/gpu}
mkdir -p "$FOLDER"
export PYTHONPATH=.
unset TRITON_INTERPRET

"$PYTHON" - <<'PROGRAM' || exit 1
import torch, triton
if not torch.cuda.is_available():
    raise SystemExit("gpu.sh: this torch sees no CUDA device; nothing was measured.")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
PROGRAM

failed=0
part() { # seconds, name, command...: its output to the screen and to FOLDER/name.txt
    local limit=$1 name=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$FOLDER/$name.txt"
    local code=${PIPESTATUS[0]}
    if [ "$code" -ne 0 ]; then
        echo "== $name: exit $code$([ "$code" -eq 124 ] && echo " (over its $limit s)")"
        failed=1
    fi
}

part 180 tests "$PYTHON" -m pytest -m gpu tests/gpu
part 60 bandwidth "$PYTHON" tools/bench/gpu_bandwidth.py --tokens 8192 --vocab 151936 --dtype bfloat16
part 330 op "$PYTHON" -m rlcore.cli bench --case op --device cuda --dtype bfloat16 --backend triton \
    --tp 1 --tokens 8192 --vocab 151936 --repeats 2 --json "$FOLDER/op.json"
exit "$failed"
