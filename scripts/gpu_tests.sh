#!/usr/bin/env bash
# Proves on a GPU that the package computes what SGLang and transformers do: one call, results as
# it goes, exit code 1 if anything failed.
#
#   scripts/gpu_tests.sh OUT [quick] [STAGE ...]
#
#   parity      6 layers of GLM-5.3's dimensions: ours, stock, transformers in FP32
#   backends    every --dsa-prefill-backend and --dsa-decode-backend (quick: a selection)
#   features    what features.py says of a GPU: weight updates, sleep, returned tensors, ...
#   long        200,000 tokens: what the indexer selects, peak memory
#   pool        page-major cache pages: kernels, host copies, the decode step, HiCache with MTP
#   memory      SGLang's weights and cache in GiB beside the estimate, nine shapes (quick: three)
#   sanitizer   compute-sanitizer over our own kernels
#   pytest      `pytest -m gpu`, which judges the results in OUT; the rest is told by now
#
# Without a stage: all of them, in this order. OUT gets few files: the judged tables (*.json), what
# was printed (gpu_tests.log) and the rest (details.tgz: answers and logs, renewed as it goes).
# Needs one Hopper GPU and an environment with SGLang, its kernel packages and this project; PYTHON
# names its Python (default python3). Checkpoints are made under GLM53_SCRATCH (default /tmp; 20 GB)
# and kept for the next call.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,22s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit "$1"; }

[ $# -ge 1 ] || usage 2
case $1 in -h | --help) usage 0 ;; esac
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd)
shift
quick=()
if [ "${1:-}" = quick ]; then quick=(--quick); shift; fi
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(parity backends long features pool memory sanitizer pytest)
for stage in "${stages[@]}"; do
  case $stage in
    parity | backends | long | features | pool | memory | sanitizer | pytest) ;;
    *) echo "gpu_tests: there is no stage $stage" >&2; usage 2 ;;
  esac
done

python=${PYTHON:-python3}
scratch=${GLM53_SCRATCH:-/tmp}
work=$scratch/glm53-gpu-results
mkdir -p "$work"
export PYTHONPATH=$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

"$python" - <<'CHECK' || exit 1
import sys

try:
    import sglang, torch, sglang_glm53
except ImportError as error:
    sys.exit(f"gpu_tests: {error}; name the Python of an environment with SGLang and this project "
             "in PYTHON")
if not torch.cuda.is_available():
    sys.exit("gpu_tests: no CUDA device here")
print(f"gpu_tests: {torch.cuda.get_device_name()}, torch {torch.__version__}, SGLang "
      f"{sglang.__version__}, sglang-glm53 {sglang_glm53.__version__}", flush=True)
CHECK

run_stage() {
  case $1 in
    parity) "$python" -m gpu.parity "$work" --checkpoint "$scratch/glm53-real-dims" ;;
    backends)
      "$python" -m gpu.backends "$work" --checkpoint "$scratch/glm53-real-dims-4" "${quick[@]}" ;;
    long) "$python" -m gpu.long_context "$work" --checkpoint "$scratch/glm53-real-dims" ;;
    features)
      "$python" -m gpu.features "$work" --checkpoint "$scratch/glm53-features" \
        ${quick:+--promised} ;;
    pool) # the slice's 78 layers need a whole GPU and five minutes: quick leaves them out
      "$python" -m gpu.pool "$work" --checkpoint "$scratch/glm53-pool" \
        ${quick:+--only kernels hicache} ;;
    memory) # needs a whole GPU of 141 GB
      "$python" -m gpu.memory "$work" ${quick:+--shapes 78-fp8 40-fp8-mtp 40-bf16} ;;
    sanitizer) "$python" -m gpu.sanitizer "$work" ;;
    pytest)
      if "$python" -c 'import pytest' 2>/dev/null; then
        GLM53_GPU_RESULTS=$work "$python" -m pytest -m gpu -p no:cacheprovider -q tests/gpu
      else
        echo "gpu_tests: pytest is not installed; the stages above are judged all the same"
      fi ;;
  esac
}

collect() { # a killed run leaves what it measured
  local name
  for name in parity backends long features pool memory sanitizer; do
    if [ -f "$work/$name.json" ]; then cp "$work/$name.json" "$out/"; fi
  done
  tar -czf "$work/../.glm53-details.tgz" -C "$scratch" "$(basename "$work")" 2>/dev/null
  mv -f "$work/../.glm53-details.tgz" "$out/details.tgz"
}
(while sleep 30; do collect; done) >/dev/null 2>&1 </dev/null &
collector=$!
trap 'kill $collector 2>/dev/null; collect' EXIT

failed=()
for stage in "${stages[@]}"; do
  began=$SECONDS
  echo "gpu_tests: $stage begins" | tee -a "$out/gpu_tests.log"
  code=0
  run_stage "$stage" 2>&1 | tee -a "$out/gpu_tests.log" || code=1
  [ $code -eq 0 ] || failed+=("$stage")
  verdict=$([ $code -eq 0 ] && echo passed || echo FAILED)
  echo "gpu_tests: $stage $verdict, $((SECONDS - began)) s" | tee -a "$out/gpu_tests.log"
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "gpu_tests: FAILED: ${failed[*]} (results in $out)"
  exit 1
fi
echo "gpu_tests: all of ${stages[*]} passed (results in $out)"
