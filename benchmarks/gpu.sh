#!/usr/bin/env bash
# The gpu tests and the gpu rows on a machine with one CUDA GPU, in under 8 minutes: benchmarks/gpu.sh [OUT]
#
# Needs python3 (>= 3.11) with torch (>= 2.11), numpy and pytest; transformers where it is there. Resumable: a stage that
# finished leaves OUT/NAME.done and is not run again. OUT/ gets logs and rows; copy rows into benchmarks/rows/.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
started=$(date +%s)
failed=0

stage() { # name, seconds, command...
  local name=$1 limit=$2
  shift 2
  [ -e "$out/$name.done" ] && { echo "done before: $name"; return; }
  echo "== $name (at most ${limit} s) after $(($(date +%s) - started)) s"
  if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
    touch "$out/$name.done"
  else
    echo "FAILED $name (exit $?)"
    failed=1
  fi
  tail -n 15 "$out/$name.log"
}

"$python" -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__, torch.cuda.get_device_name(0))' || exit 1
"$python" -m pip install -q --no-deps --no-build-isolation -e . || echo "not installed; the numpy kernel runs"
for area in runtime flatteners/boundary flatteners/optimizer flatteners/vocab flatteners/dispatch; do
  stage "tests-${area//\//-}" 100 "$python" -m pytest -q -m gpu "tests/$area" --timeout=90
done
for case in optimizer vocab dispatch boundary; do
  stage "rows-$case" 100 "$python" -m benchmarks.run "$case" --gpu --rows "$out"
done
exit $failed
