#!/usr/bin/env bash
# make_env.sh FOLDER: an environment with SGLang on a CPU torch, this checkout in it (editable), and older SGLang
# releases beside it. FOLDER/freeze-before.txt and freeze-after.txt say what installing hicache-obs changed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
python=${PYTHON:-python3}
older=(0.5.14 0.5.18 0.5.20 0.5.22)

rm -rf "$folder"
mkdir -p "$folder"
"$python" -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check)

"${pip[@]}" torch==2.13.0
# Pins the torch that is there: torchvision alone would bring another one, with CUDA and 4 GB of it.
"$folder/venv/bin/python" -m pip freeze | grep '^torch==' >"$folder/constraints.txt"
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0 triton==3.9.0
"${pip[@]}" -c "$folder/constraints.txt" -r tests_sglang/requirements.txt

for version in "${older[@]}"; do
  "${pip[@]}" --no-deps --target "$folder/sglang-$version" "sglang==$version"
done
# What releases up to 0.5.20 want in other versions.
"${pip[@]}" --no-deps --target "$folder/older" -r tests_sglang/requirements-older.txt

"$folder/venv/bin/python" -m pip freeze --exclude hicache-obs >"$folder/freeze-before.txt"
"${pip[@]}" -e .
"$folder/venv/bin/python" -m pip freeze --exclude hicache-obs >"$folder/freeze-after.txt"
touch "$folder/.complete"
