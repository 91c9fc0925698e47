#!/usr/bin/env bash
# Runs the papers' experiments at the small size of docs/results/papers.md on the GPUs of one machine: data, models,
# results, figures.
#
#   bash eval/papers/papers.sh TEXT QUESTIONS [OUT]
#
# TEXT: a folder with train.NAME.jsonl.zst, valid.NAME.jsonl.zst (one NAME is books) and tokenizer.json.
# QUESTIONS: comma-separated files in SQuAD's format. OUT: the output folder, by default runs/papers.
# Each GPU runs one job at a time, the longest jobs first. Their output is in OUT/logs. SIGINT and SIGTERM save the
# models in training and exit with code 75. The same command then continues, and does not repeat jobs that have ended.
# GPUS="0 1" selects GPUs, JOBS="p_n mqrar_softmax_32" selects jobs, PRINT=1 only prints the commands.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

[ $# -ge 2 ] || fail "usage: bash eval/papers/papers.sh TEXT QUESTIONS [OUT]"
text=$(realpath -m "$1") out=$(realpath -m "${3:-runs/papers}")
questions=$(tr , '\n' <<<"$2" | xargs -d '\n' realpath -m | paste -sd ,)
print=${PRINT:-}
gpus=${GPUS:-$({ nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true; } | xargs)}
books=$text/valid.books.jsonl.zst
base=model.position.rope.base=500000
cd "$(dirname "$0")/../.."
[ ! -d .venv ] || export PATH=$PWD/.venv/bin:$PATH

[ -n "$print" ] || [ -n "$gpus" ] || fail "this machine has no GPU, and the smallest of these models takes hours on a CPU"
for file in "$text/tokenizer.json" "$books" ${questions//,/ }; do
    [ -n "$print" ] || [ -f "$file" ] || fail "there is no file $file"
done

run() { if [ -n "$print" ]; then echo "$*"; else "$@"; fi; }

pack() {  # NAME OPTIONS...
    local name=$1 file source=(); shift
    for file in "$text"/train.*.jsonl.zst; do
        local part=${file#"$text/train."}
        part=${part%.jsonl.zst}
        source+=(--source "$part=$file" --source "$part=$text/valid.$part.jsonl.zst:valid")
    done
    run python -m data_prep pack --out "$out/data/$name" "$@" --valid-fraction 0 "${source[@]}"
}

data() {
    pack 1024 --length 1024 --tokenizer "$text/tokenizer.json"
    pack 2048 --length 2048 --tokenizer "$text/tokenizer.json"
    pack p_n --length 1024 --train-vocab-size 8192
}

pair() {  # CORE: arXiv:2501.19399, Figures 4 to 8
    local model=$out/50m_$1
    run python launch/pretrain.py "config=50m_$1" "run_dir=$model" "data.path=$out/data/1024" train.microbatch=64 \
        train.save_every=800 train.eval_every=400
    run python -m eval.papers.long_context "$model" --texts "$books" --lengths 20000 --windows 60 $base
    run python launch/finetune.py "from=$model" "questions=$questions" "run_dir=${model}_qa" microbatch=128 train.save_every=400
    run python -m eval.papers.needle "${model}_qa" --texts "$books" $base
    run python -m eval.papers.needle "${model}_qa" --texts "$books" $base --scores
}

p_n() {  # its Figure 2
    run python launch/pretrain.py config=162m_ssmax_pn "run_dir=$out/p_n" "data.path=$out/data/p_n" model.vocab_size=8192 \
        model.num_layers=6 model.hidden_size=512 model.num_heads=8 model.ffn_hidden_size=1408 train.batch_size=128 \
        train.microbatch=64 train.stages.0.tokens=235929600 train.stages.0.schedule.kind=cosine \
        train.stages.0.schedule.lr=2e-3 train.stages.0.schedule.warmup_tokens=6553600
    run python -m eval.papers.pn_fit "$out/p_n"
}

extrapolation() {  # METHOD: arXiv:2410.17980, Figure 5
    local model=$out/50m_$1 lengths=2048,4096,8192,16384,32768,65536
    run python launch/pretrain.py "config=50m_$1" "run_dir=$model" "data.path=$out/data/2048" train.microbatch=32 \
        train.save_every=400 train.eval_every=400
    run python -m eval.papers.long_context "$model" --texts "$books" --lengths $lengths
    [ "$1" != rope ] || run python -m eval.papers.long_context "$model" --texts "$books" --lengths $lengths \
        model.position.rope.scaling=dynamic_ntk model.position.rope.train_length=2048
}

mqrar() {  # CORE PAIRS: its Figures 3 and 4
    if [ "$2" = picture ]; then
        run python -m eval.papers.mqrar picture --out "$out/mqrar" --cores "$1" --minutes 60
    else
        run python -m eval.papers.mqrar curve --out "$out/mqrar" --cores "$1" --pairs "$2" --minutes 60
    fi
}

figures() {
    local name
    draw() { run python -m eval.papers.figures "$@" --out "$out/figures/$1"; }
    for name in fading threshold; do draw $name; done
    for name in training_losses loss_by_position; do draw $name "$out"/50m_{softmax,ssmax}; done
    for name in needle_map needle_heads needle_top; do draw $name "$out"/50m_{softmax,ssmax}_qa; done
    for name in mqrar mqrar_attention; do draw $name "$out/mqrar"; done
    draw extrapolation "$out"/50m_{rope,nope,sb,alibi,window512}
}

all="pair_ssmax pair_softmax p_n $(echo extrapolation_{rope,nope,sb,alibi,window512}) "
for pairs in 192 160 128 96 64 32 picture; do all+="mqrar_softmax_$pairs mqrar_stickbreaking_$pairs "; done
jobs=${JOBS:-$all}
for job in $jobs; do [[ " $all " == *" $job "* ]] || fail "JOBS: there is no job $job; use $all"; done

call() {  # pair_softmax → pair softmax
    case $1 in p_n) p_n ;; *) "${1%%_*}" $(tr _ ' ' <<<"${1#*_}") ;; esac
}

if [ -n "$print" ]; then
    data
    for job in $jobs; do echo "# $job"; call "$job"; done
    [ -n "${JOBS:-}" ] || figures
    exit
fi

mkdir -p "$out/logs" "$out/figures"
taken=$(mktemp -d)
trap 'rm -rf "$taken"' EXIT
stop() {
    trap '' INT TERM
    exec 3>&2 2>/dev/null  # hides bash's notices about ended jobs
    local group
    for group in $(jobs -p); do kill -TERM -- "-$group" || true; done
    wait
    echo "stopped: the same command continues" >&3
    exit 75
}
trap stop INT TERM
set -m  # each background job is a process group, so that `stop` reaches its programs
echo "data: $out/logs/data.log"
# Not `(data) || fail`: within a condition, bash continues after a command that failed.
(trap 'exit 75' TERM; data) >"$out/logs/data.log" 2>&1 &
wait $! || fail "the data could not be prepared: $(tail -1 "$out/logs/data.log")"
worker() {
    export CUDA_VISIBLE_DEVICES=$1
    trap 'wait; exit 75' TERM
    local job
    for job in $jobs; do
        mkdir "$taken/$job" 2>/dev/null || continue
        local began=$SECONDS log=$out/logs/$job.log
        (trap 'exit 75' TERM; call "$job") >"$log" 2>&1 &  # after the program, which saves first
        if wait $!; then
            echo "$job: $((SECONDS - began)) s on GPU $1"
        else
            echo "$job: failed, see $log: $(tail -1 "$log")"
            touch "$taken/$job/failed"
        fi
    done
}
for gpu in $gpus; do worker "$gpu" & done
wait
failed=$(find "$taken" -name failed | wc -l)
[ "$failed" = 0 ] || { echo "error: $failed jobs failed; the same command runs them again" >&2; exit 1; }
[ -n "${JOBS:-}" ] || figures
