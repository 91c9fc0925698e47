#!/usr/bin/env bash
# Turns a Llama-like model of transformers into an SSMax model, and measures what that changes on long contexts
# (docs/guide/ssmax_your_model.md).
#
#   bash eval/papers/ssmax_your_model.sh TEXT [OUT]
#
# 1. trains 50m_softmax and exports it as a plain Llama; MODEL=FOLDER takes your own model instead
# 2. imports it, and continues twice on the same rows: with softmax, as a control, and with SSMax
# 3. measures the three models on 1, 2, 4 and 8 times the training length
# 4. exports the SSMax model
#
# TEXT: a folder with train.NAME.jsonl.zst, valid.NAME.jsonl.zst and tokenizer.json (that of MODEL counts, if it is set);
# or `stdlib`, which takes the built-in corpus and tiny_softmax, for a CPU. OUT: runs/ssmax_your_model by default.
# SIGINT and SIGTERM save the model in training and exit with code 75. The same command then continues, and does not
# repeat what has ended. PRINT=1 only prints the commands.
#
# For your own model, these variables have defaults that fit 50m_softmax: LENGTH (tokens per row), TOKENS (of training),
# BATCH (rows per step), MICROBATCH, LR (peak), ONE_DOCUMENT (true: each row counts as one document), BASE (RoPE's base for
# long contexts), HELD_OUT (texts of the measurement), WINDOWS, SAMPLES (of the measurement), PRETRAIN (keys of step 1) and
# WORKERS (such as gpus=8).
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

[ $# -ge 1 ] || fail "usage: bash eval/papers/ssmax_your_model.sh TEXT [OUT]"
out=$(realpath -m "${2:-runs/ssmax_your_model}") print=${PRINT:-} model=${MODEL:+$(realpath -m "$MODEL")}
[ "$1" = stdlib ] && text= || text=$(realpath -m "$1")
held_out=${HELD_OUT:+$(realpath -m "$HELD_OUT")}
cd "$(dirname "$0")/../.."
[ ! -d .venv ] || export PATH=$PWD/.venv/bin:$PATH

base_tokens=131072000  # 1,000 steps
if [ -n "$text" ]; then
    config=50m_softmax
    : "${LENGTH:=1024}" "${TOKENS:=19660800}" "${BATCH:=128}" "${MICROBATCH:=64}" "${LR:=5e-4}" "${ONE_DOCUMENT:=true}"
    : "${WINDOWS:=60}" "${SAMPLES:=100}" "${PRETRAIN:=train.stages.0.tokens=$base_tokens train.microbatch=64 train.eval_every=400}"
    : "${held_out:=$text/valid.books.jsonl.zst}"
else
    config=tiny_softmax
    : "${LENGTH:=256}" "${TOKENS:=262144}" "${BATCH:=16}" "${MICROBATCH:=8}" "${LR:=2e-3}" "${ONE_DOCUMENT:=false}"
    : "${WINDOWS:=20}" "${SAMPLES:=20}" "${PRETRAIN:=}"
    : "${held_out:=$out/held_out.txt}"
fi
base=model.position.rope.base=${BASE:-500000}
lengths=$LENGTH,$((2 * LENGTH)),$((4 * LENGTH)),$((8 * LENGTH))
read -ra pretrain <<<"$PRETRAIN"
read -ra workers <<<"${WORKERS:-}"

tokenizer=${model:-$text}/tokenizer.json
if [ -z "$print" ]; then
    [ -z "$text" ] || for file in "$tokenizer" "$held_out"; do [ -f "$file" ] || fail "there is no file $file"; done
    [ -z "$text" ] || [ -n "$model" ] || nvidia-smi >/dev/null 2>&1 ||
        fail "this machine has no GPU, and 50m_softmax takes hours on a CPU: use TEXT=stdlib, or your own model"
fi

child=
run() {
    if [ -n "$print" ]; then echo "$*"; return; fi
    echo "# $*"
    "$@" &
    child=$!
    wait "$child"
}
stop() {
    trap '' INT TERM
    exec 3>&2 2>/dev/null  # hides bash's notice about the ended job
    [ -z "$child" ] || kill -TERM -- "-$child" || true
    wait
    echo "stopped: the same command continues" >&3
    exit 75
}
trap stop INT TERM
set -m  # each command is a process group, so that `stop` reaches its workers

pack() {
    local file source=(--config configs/corpus/stdlib.yaml)
    if [ -z "$text" ] && [ -n "$model" ]; then
        source=(--tokenizer "$tokenizer" --valid-fraction 0.05 --source code=stdlib:code --source docs=stdlib:docs)
    elif [ -n "$text" ]; then
        source=(--tokenizer "$tokenizer" --valid-fraction 0)
        for file in "$text"/train.*.jsonl.zst; do
            local part=${file#"$text/train."}
            part=${part%.jsonl.zst}
            source+=(--source "$part=$file" --source "$part=$text/valid.$part.jsonl.zst:valid")
        done
    fi
    run python -m data_prep pack --out "$out/data" --length "$LENGTH" "${source[@]}"
}

continued() {  # MIXER: 10 % of the steps are warmup
    run python launch/pretrain.py "config=$out/imported/config.yaml" "init_from=$out/imported" "run_dir=$out/$1" \
        "model.mixers=[$1]" "data.path=$out/data" "data.length=$LENGTH" "data.one_document=$ONE_DOCUMENT" \
        "optimizer.adamw.betas=[0.9,0.95]" "train.batch_size=$BATCH" "train.microbatch=$MICROBATCH" \
        "train.stages.0.tokens=$TOKENS" train.stages.0.schedule.kind=cosine "train.stages.0.schedule.lr=$LR" \
        "train.stages.0.schedule.warmup_tokens=$((TOKENS / 10))" train.stages.0.schedule.floor=0.1 "${workers[@]}"
}

measure() {  # RUN... [KEY=VALUE]
    run python -m eval.papers.long_context "$@" --texts "$held_out" --lengths "$lengths" --windows "$WINDOWS"
    run python -m eval.papers.repeats "$@" --texts "$held_out" --lengths "$lengths" --samples "$SAMPLES"
}

pack
# The sources of this package are Python code like the corpus, but are not part of it.
[ -n "$text" ] || [ -n "$print" ] || find ssscale -name '*.py' | LC_ALL=C sort | xargs cat >"$out/held_out.txt"
if [ -z "$model" ]; then
    model=$out/llama
    run python launch/pretrain.py "config=$config" "run_dir=$out/$config" "data.path=$out/data" "${pretrain[@]}" "${workers[@]}"
    [ -f "$model/config.json" ] || run python launch/export.py "checkpoint=$out/$config" "out=$model" format=llama
fi
[ -d "$out/imported/checkpoints/step-00000000" ] || run python launch/import_hf.py "from=$model" "out=$out/imported"
continued softmax
continued ssmax
measure "$out/imported"
measure "$out/imported" "$out/softmax" "$out/ssmax" "$base"
[ -f "$out/exported/config.json" ] || run python launch/export.py "checkpoint=$out/ssmax" "out=$out/exported"
for figure in loss_by_position repeats; do
    run python -m eval.papers.figures $figure "$out/imported" "$out/softmax" "$out/ssmax" --out "$out/figures/$figure"
done
run python -m eval.papers.before_after "$out/imported" "$out/softmax" "$out/ssmax"
