#!/usr/bin/env bash
# The figures of the README and of the documents, on one GPU, about half an hour in all:
#
#     benchmarks/all.sh                 everything
#     benchmarks/all.sh verify peers    these parts alone
#
# PYTHON says which Python, RESULTS the folder (benchmarks/results by default). A part
# that fails does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
out=${RESULTS:-results}
layers=(mamba2 gated_delta_net kda)
export PYTHONPATH=..${PYTHONPATH:+:$PYTHONPATH}

kernels() { "$python" kernels.py --out "$out" --side-by-side --implementation mosaic_gpu "$@"; }

# Time of a step over the batch, rows together and at spread fills.
part_kernels() {
  kernels --layer "${layers[@]}" --forms uniform staggered --repeats 5
  kernels --layer mamba2-80 --batch 256 --add
}
# Steps at each fill of the window.
part_fills() { kernels --layer "${layers[@]}" --batch 1 256 --fills --name fills; }
# Several tokens, against a snapshot of the state for each.
part_verify() {
  kernels --layer "${layers[@]}" --tokens 4 8 --name verify --repeats 5
  kernels --layer "${layers[@]}" --tokens 4 8 --accepted half --batch 256 --name verify --add --repeats 5
  other_window=(--tokens 8 --accepted all half --batch 256 --name verify --add --repeats 3)
  kernels --layer mamba2 --window 16 "${other_window[@]}"
  kernels --layer gated_delta_net kda --window 32 "${other_window[@]}"
}
# Read copies, with longer windows.
part_copies() {
  kernels --layer "${layers[@]}" --batch 256 --read-dtype bfloat16 int8 float8_e4m3fn \
    --window 16 32 64 --forms uniform windowed --layers 6 --name copies --repeats 3
}
# The Triton kernels beside the Mosaic ones; needs jax-triton.
part_triton() {
  "$python" kernels.py --out "$out" --side-by-side --layer "${layers[@]}" --batch 256 --name triton \
    --implementation triton mosaic_gpu --baseline mosaic_gpu
}
# Other packages' steps; needs what peers.py names.
part_peers() { "$python" peers.py --out "$out"; }
# Whole models.
part_speculative() {
  "$python" speculative.py --out "$out" --side-by-side --model nemotron-3-nano-4b --layers 14 \
    --threads 10 --tokens 2 4 8 --repeats 4
  "$python" speculative.py --out "$out" --side-by-side --model qwen3.5-4b kimi-linear --layers 8 \
    --threads 6 --tokens 2 4 8 --repeats 4 --add
}
part_trained() {
  "$python" speculative.py --out "$out" --side-by-side --model trained --batch 1 16 64 --tokens 4 \
    --name speculative-trained
}
part_memory() { "$python" largest_batch.py --out "$out" --tokens 4 --threads 14; }

failed=0
for part in "${@:-kernels fills verify copies triton peers speculative trained memory}"; do
  for one in $part; do
    begin=$SECONDS
    "part_$one" || failed=1
    printf '== %s: %d s\n' "$one" $((SECONDS - begin))
  done
done
exit $failed
