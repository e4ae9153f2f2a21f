#!/usr/bin/env bash
# Both trainers on the fixed workload, one after the other on one card; then the ratio of their pairs/s.
# usage: bench/side_by_side.sh [folder for the results]        needs trl, liger-kernel and datasets beside this package
set -euo pipefail
out=$(realpath "${1:-.}")
cd "$(dirname "$0")"
export PYTHONPATH="$PWD/..${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
python3 yardstick.py --examples_per_step 16 | tee "$out/tuningfork.json"
python3 trl_bench.py --bs 16 --gc 1 --liger 1 2> >(tail -5 >&2) | tee "$out/trl.json"
python3 - "$out" <<'PY'
import json, sys
rate = {
    name: [json.loads(line) for line in open(f"{sys.argv[1]}/{name}.json") if line.startswith('{"trainer"')][-1]["pairs_s"]
    for name in ("tuningfork", "trl")
}
print(f"tuningfork {rate['tuningfork']} pairs/s, TRL {rate['trl']} pairs/s: {rate['tuningfork'] / rate['trl']:.2f} x")
PY
